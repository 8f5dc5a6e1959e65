"""A cluster that TF_CONFIG, Slurm or a file describes: who is who, and what is wrong by its key."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2])]

from scripts import _cluster, _environment, _flags  # noqa: E402
from towers.cluster import spec  # noqa: E402

WORKERS = ['a:2222', 'b:2222']


def text(cluster, task=None):
    return json.dumps({'cluster': cluster, 'task': task or {'type': 'worker', 'index': 0}})


@pytest.mark.parametrize(
    ('cluster', 'task', 'job', 'index', 'hosts', 'ps'),
    [
        ({'worker': WORKERS}, ('worker', 0), 'master', 0, WORKERS, []),
        ({'worker': WORKERS}, ('worker', 1), 'worker', 1, WORKERS, []),
        ({'worker': WORKERS}, ('worker', '1'), 'worker', 1, WORKERS, []),
        ({'chief': ['c:1'], 'worker': WORKERS}, ('chief', 0), 'master', 0, ['c:1', *WORKERS], []),
        ({'chief': ['c:1'], 'worker': WORKERS}, ('worker', 1), 'worker', 2, ['c:1', *WORKERS], []),
        ({'master': ['c:1'], 'worker': WORKERS, 'ps': ['d:1', 'e:1']}, ('ps', 1), 'ps', 1, ['c:1', *WORKERS], ['d:1', 'e:1']),
        ({'worker': WORKERS, 'evaluator': ['f:1']}, ('worker', 0), 'master', 0, WORKERS, []),
    ],
)
def test_a_tf_config_says_who_is_who(cluster, task, job, index, hosts, ps):
    found = _environment.tf_config(text(cluster, {'type': task[0], 'index': task[1]}))
    assert (found.job, found.index) == (job, index)
    assert found.flags == {'worker_hosts': hosts, 'ps_hosts': ps, 'master_host': hosts[0]}


def test_a_tf_config_of_one_machine_is_no_cluster():
    assert _environment.tf_config(text({'worker': ['a:1']})) is None


@pytest.mark.parametrize(
    ('config', 'said'),
    [
        ('{', 'TF_CONFIG is no JSON'),
        ('[]', r'TF_CONFIG wants an object, got \[\]; expected \{"cluster"'),
        (json.dumps({'cluster': {'worker': WORKERS}, 'rpc_layer': 'grpc+verbs'}), r'TF_CONFIG: rpc_layer is "grpc\+verbs"'),
        (text([]), r'TF_CONFIG: cluster wants an object, got \[\]'),
        (json.dumps({'cluster': {'worker': WORKERS}}), "TF_CONFIG holds no task, got 'cluster'; expected"),
        (json.dumps({'clutser': {'worker': WORKERS}, 'task': {}}), "TF_CONFIG holds no cluster, got 'clutser', 'task'; expected"),
        ('{"task": null, "cluster": {}}', 'TF_CONFIG: task wants an object, got null'),
        (text({'wrker': WORKERS}), 'TF_CONFIG: cluster.wrker is no job; expected some of chief'),
        (text({'worker': 'a:1'}), 'TF_CONFIG: cluster.worker wants a list of "host:port", got "a:1"'),
        (text({'worker': ['a', 'b:1']}), "TF_CONFIG: cluster.worker holds 'a'; expected host:port"),
        (text({'ps': ['a:1']}), 'TF_CONFIG: cluster.worker holds no task'),
        (text({'chief': ['a:1'], 'master': ['b:1'], 'worker': WORKERS}), 'TF_CONFIG: cluster.chief and cluster.master hold 2 tasks'),
        (text({'worker': WORKERS}, {'type': 'worker'}), "TF_CONFIG holds no task.index, got 'type' in task; expected"),
        (text({'worker': WORKERS}, {'index': 0}), "TF_CONFIG holds no task.type, got 'index' in task; expected"),
        (text({'worker': WORKERS}, {'type': 'worker', 'index': 2}), 'TF_CONFIG: task is worker 2, which cluster.worker does not hold'),
        (text({'worker': WORKERS}, {'type': 'evaluator', 'index': 0}), 'TF_CONFIG: task.type is evaluator; start scripts/evaluate.py'),
    ],
    ids=range(16),
)
def test_a_tf_config_that_is_wrong_is_told_by_its_key(config, said):
    with pytest.raises(ValueError, match=said):
        _environment.tf_config(config)


def slurm_step(monkeypatch, **changes):
    values = {
        'SLURM_STEP_NUM_TASKS': '3', 'SLURM_STEP_NODELIST': 'm7,n[1-2]', 'SLURM_STEP_TASKS_PER_NODE': '1(x3)', 'SLURM_PROCID': '1',
        'SLURM_NTASKS': '3', 'SLURM_JOB_NODELIST': 'm7,n[1-2]', **changes,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_a_slurm_step_is_a_cluster(monkeypatch):
    found = _environment.read(slurm_step(monkeypatch))
    assert (found.job, found.index) == ('worker', 1)
    assert found.flags == {'worker_hosts': ['m7:2222', 'n1:2222', 'n2:2222'], 'ps_hosts': [], 'master_host': 'm7:2222'}
    assert _environment.read(slurm_step(monkeypatch, SLURM_PROCID='0')).job == 'master'
    with pytest.raises(ValueError, match='Task 1 of the Slurm step is on n9, the list of nodes has n1:2222 there'):
        _environment.read(slurm_step(monkeypatch, SLURMD_NODENAME='n9'))
    monkeypatch.delenv('SLURMD_NODENAME')
    assert _environment.read(slurm_step(monkeypatch, SLURM_STEP_NUM_TASKS='1')) is None


def test_a_slurm_step_with_several_tasks_on_a_node_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r'SLURM_STEP_TASKS_PER_NODE is 2,1; .*--ntasks-per-node=1'):
        _environment.read(slurm_step(monkeypatch, SLURM_STEP_TASKS_PER_NODE='2,1'))


OLDER = {'SLURM_STEPID': '0', 'SLURM_NPROCS': '3', 'SLURM_NODELIST': 'm7,n[1-2]', 'SLURM_NNODES': '3', 'SLURM_PROCID': '2'}


def test_the_older_names_of_slurm_will_do(monkeypatch):
    for name in ('SLURM_STEP_NODELIST', *OLDER):
        monkeypatch.setenv(name, OLDER.get(name, ''))  # so that it is as before after the test
    monkeypatch.delenv('SLURM_STEP_NODELIST')
    found = _environment.read(OLDER)
    assert (found.job, found.index, found.flags['worker_hosts']) == ('worker', 2, ['m7:2222', 'n1:2222', 'n2:2222'])


@pytest.mark.parametrize(
    ('without', 'changes', 'said'),
    [
        ('SLURM_NODELIST', {}, 'has 3 tasks, got none of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST'),
        ('SLURM_NPROCS', {}, 'has 3 nodes, got none of SLURM_STEP_NUM_TASKS, SLURM_NTASKS, SLURM_NPROCS'),
        ('SLURM_STEPID', {}, 'gave this job 3 nodes, but this process is no task of a step on them; start it with srun'),
        ('SLURM_PROCID', {'SLURM_JOB_NUM_NODES': '4'}, 'gave this job 4 nodes, but this process is no task'),
        (None, {'SLURM_NODELIST': 'm7,n[1-3]'}, r'has 3 tasks, got other nodes for them: m7,n\[1-3\]'),
        (None, {'SLURM_NODELIST': 'n[1-'}, r"SLURM_NODELIST wants a list of nodes as node\[1-3,7\], got 'n\[1-'; give --worker_hosts"),
        (None, {'SLURM_NODELIST': 'n[3-1]'}, r"SLURM_NODELIST wants a list of nodes as node\[1-3,7\], got 'n\[3-1\]'"),
        (None, {'SLURM_PROCID': 'x'}, "SLURM_PROCID wants a whole number, got 'x'; start this process with srun, or give --worker_hosts"),
        (None, {'SLURM_PROCID': '7'}, 'SLURM_PROCID is 7, got 3 tasks in the Slurm step'),
        (None, {'SLURM_NNODES': '-3'}, "SLURM_NNODES wants a whole number, got '-3'"),
        (None, {'SLURM_NPROCS': '3x'}, "SLURM_NPROCS wants a whole number, got '3x'"),
    ],
    ids=range(11),
)
def test_several_nodes_of_slurm_are_never_left_idle(monkeypatch, without, changes, said):
    given = {name: value for name, value in {**OLDER, **changes}.items() if name != without}
    for name in ('SLURM_STEP_NODELIST', *given):
        monkeypatch.setenv(name, given.get(name, ''))
    monkeypatch.delenv('SLURM_STEP_NODELIST')
    with pytest.raises(ValueError, match=said):
        _environment.read(given)


def test_one_task_of_slurm_trains_alone():
    assert _environment.read({**OLDER, 'SLURM_STEP_NUM_TASKS': '1'}) is None
    assert _environment.read({'SLURM_NNODES': '1', 'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}) is None


def test_an_environment_that_says_nothing():
    assert _environment.read({'SLURM_NTASKS': '3', 'SLURM_PROCID': '0'}) is None  # a batch script, not a step of it


ONE, TWO = text({'worker': ['a:1']}), text({'worker': WORKERS})


@pytest.mark.parametrize(
    ('flags', 'environment', 'count', 'said'),
    [
        ([], {}, 0, []),
        (['--worker_hosts=c:1'], {}, 1, []),
        ([], {'TF_CONFIG': '{}'}, 0, []),
        ([], {'TF_CONFIG': ' { } ', **OLDER}, 3, ['Slurm names 3 machines; this is worker 2.']),
        ([], {'TF_CONFIG': TWO}, 2, ['TF_CONFIG names 2 machines; this is master 0.']),
        ([], {'TF_CONFIG': TWO, **OLDER}, 2, ['TF_CONFIG names 2 machines; this is master 0; not looked at: Slurm.']),
        ([], {'TF_CONFIG': ONE, **OLDER}, 0, ['TF_CONFIG names one machine; not looked at: Slurm.']),
        ([], {**OLDER, 'SLURM_NPROCS': '1'}, 0, ['Slurm names one machine.']),
        (
            ['--worker_hosts=c:1'],
            {'TF_CONFIG': '{', **OLDER},
            1,
            ['The cluster is that of --worker_hosts; not looked at: TF_CONFIG, Slurm.'],
        ),
    ],
    ids=range(9),
)
def test_whose_cluster_is_taken_is_told(monkeypatch, caplog, flags, environment, count, said):
    for name in ('SLURM_STEP_NODELIST', *OLDER, 'TF_CONFIG'):
        monkeypatch.setenv(name, environment.get(name, ''))  # so that it is as before after the test
        if name not in environment:
            monkeypatch.delenv(name)
    values = _flags.define()
    _flags.parse(values, ['train.py', *flags])
    with caplog.at_level('INFO'):
        config, _ = _cluster.found(values, _flags.to_config(values))
    assert len(config.worker_hosts) == count
    assert [record.message for record in caplog.records] == said


def test_a_file_of_hosts(tmp_path):
    path = tmp_path / 'hosts'
    path.write_text('# the machines\na\n\nb:99  # the second\n')
    assert _environment.hosts_file(str(path)) == ['a:2222', 'b:99']
    path.write_text('# nobody\n')
    with pytest.raises(ValueError, match='names no host; expected host or host:port'):
        _environment.hosts_file(str(path))


CLUSTERS = pathlib.Path(__file__).resolve().parents[2] / 'scripts' / 'clusters'


def test_the_commands_of_the_kubernetes_manifest_make_one_cluster():
    text = (CLUSTERS / 'kubernetes.yaml').read_text()
    hosts = re.search(r'hosts=(\S+);', text)[1]
    commands = [shlex.split(found) for found in re.findall(r'exec (python .*?);', text.replace('\n', ' '))]
    assert [command[1] for command in commands] == ['scripts/train.py', 'scripts/worker.py']
    pods = int(re.search(r'completions: (\d+)', text)[1])
    assert len(hosts.split(',')) == pods
    found = []
    for command in commands:
        values = _flags.define()
        rest = [flag.replace('$hosts', hosts) for flag in command[2:] if not flag.startswith('--task_index')]
        _flags.parse(values, [command[1], *rest])
        found.append(spec.of(_flags.to_config(values)))
    assert found[0] == found[1] and found[0].master == found[0].workers[0]  # pod 0 has towers and makes the steps


def test_the_slurm_script_is_a_script_of_the_training():
    path = CLUSTERS / 'slurm.sh'
    assert subprocess.run(['bash', '-n', str(path)], check=False).returncode == 0
    [command] = re.findall(r'^exec srun (.*)$', path.read_text(), re.MULTILINE)
    values = _flags.define()
    _flags.parse(values, shlex.split(command)[1:-1])
    assert values.num_gpus == 4 and '--ntasks-per-node=1' in path.read_text()
