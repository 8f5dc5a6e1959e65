import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import towers
from towers import identity
from towers.sessions import admission, host, ledger, membership, memory, report

MACHINE = admission.Machine(memory_mb=1000, gpus=(0, 1, 2, 3))


def entry(**fields):
    return ledger.Entry(role='master', **{'gpus': (0,), 'model_dir': '/runs/a', **fields})


def other(pid=1, **fields):
    """A session of a living process that is not this one: the first of the system."""
    return entry(pid=pid, started=identity.start_of(pid), **fields)


@pytest.mark.parametrize(
    ('held', 'asked', 'fits'),
    [
        ([{'share': 0.7}], {'share': 0.5}, False),
        ([{'share': 0.7}], {'share': 0.3}, True),
        ([{'share': 0.3}, {'share': 0.4}], {'share': 0.3}, True),
        ([{'share': 0.3}, {'share': 0.4}], {'share': 0.31}, False),
        ([{'share': 0.7}], {'share': 0.5, 'gpus': (1,)}, True),
        ([{'share': 0.7, 'gpus': (1, 2)}], {'share': 0.5, 'gpus': (0, 2)}, False),
        ([{'share': 0.7, 'fake': False}], {'share': 0.5}, True),  # a fake GPU 0 is not the real one
        ([{'share': 1.0, 'fake': False}], {'share': 1.0, 'fake': False}, False),
        ([{'share': None}], {'share': 1.0}, True),
        ([{'share': 1.0}], {'share': None}, True),
        ([], {'share': 1.0}, True),
        ([{'memory_mb': 700}], {'memory_mb': 300}, True),
        ([{'memory_mb': 700}], {'memory_mb': 301}, False),
        ([{'memory_mb': 700}], {'memory_mb': None}, True),
    ],
)
def test_shares_of_a_gpu_and_of_the_memory_stay_within_the_whole(monkeypatch, held, asked, fits):
    monkeypatch.setattr(memory, 'used_mb', lambda pid: 0)
    others = [other(pid=place, **fields) for place, fields in enumerate(held, start=1)]
    session = entry(**asked)
    if fits:
        assert admission.admit(session, others, MACHINE) is session
    else:
        with pytest.raises(admission.Refused):
            admission.admit(session, others, MACHINE)


@pytest.mark.parametrize(
    ('held', 'divide', 'share'), [([], 1, 1.0), ([], 3, 0.33), ([0.7], 1, 0.3), ([0.25, 0.25], 2, 0.25), ([0.999], 1, None)]
)
def test_a_plan_divides_what_is_left(held, divide, share):
    machine = dataclasses.replace(MACHINE, planned=(entry(),) * (divide - 1))
    others = [other(pid=place, share=each) for place, each in enumerate(held, start=1)]
    if share is None:
        with pytest.raises(admission.Refused):
            admission.admit(entry(), others, machine, plan=True)
    else:
        assert admission.admit(entry(), others, machine, plan=True).share == share


def test_a_process_has_one_share_of_a_gpu_however_many_sessions():
    others = [other(share=0.4), other(share=0.3), other(share=0.4, gpus=(1,))]
    assert admission.admit(entry(share=0.6), others, MACHINE).share == 0.6
    with pytest.raises(admission.Refused, match='of which 0.40 is held'):
        admission.admit(entry(share=0.61), others, MACHINE)


def test_the_refusal_says_who_holds_what_and_what_would_fit():
    others = [other(share=0.7, gpus=(0, 1), host='box', model_dir='/runs/b')]
    with pytest.raises(admission.Refused) as refused:
        admission.admit(entry(share=0.5, gpus=(1, 0)), others, MACHINE)
    first, heading, row, fits = refused.value.screen.splitlines()
    assert first == 'This session wants 0.50 of fake GPU 1, of which 0.70 is held and 0.30 free.'
    assert heading.split() == ['role', 'process', 'host', 'GPUs', 'share', 'memory', 'run', 'directory']
    assert row.split()[:6] == ['master', '1', 'box', 'fake', '0,1', '0.70'] and row.endswith('/runs/b')
    assert fits == 'What would fit: --gpu_memory_fraction=0.3, or --visible_gpus=2,3, or wait for the end of 1.'


def test_an_evaluator_is_not_told_to_wait_for_its_own_training():
    asked = ledger.Entry(role='evaluator', gpus=(0,), share=0.5, model_dir='/runs/a')
    with pytest.raises(admission.Refused) as refused:
        admission.admit(asked, [other(share=0.7)], MACHINE)
    assert refused.value.screen.endswith(': --gpu_memory_fraction=0.3, or --visible_gpus=1, or a smaller share of the training.')
    with pytest.raises(admission.Refused, match='or wait for the end of 1'):
        admission.admit(asked, [other(share=0.7, model_dir='/runs/b')], MACHINE)


@pytest.mark.parametrize(
    ('free', 'share', 'ways'),
    [
        ([0, 1], 0.5, ['--visible_gpus=2', '--device=cpu']),
        ([0, 1, 2, 3], 1.0, ['--device=cpu']),
    ],
)
def test_what_would_fit_is_among_the_real_gpus(free, share, ways):
    others = [other(share=1.0, gpus=(number,), fake=False) for number in free]
    with pytest.raises(admission.Refused) as refused:
        admission.admit(entry(share=share, fake=False), others, MACHINE)
    said = refused.value.screen.splitlines()[-1]
    assert [way.strip(',.') for way in said.removeprefix('What would fit: ').split(' or ')[:-1]] == ways


def test_entries_come_and_go_with_their_sessions(tmp_path):
    here, run = tmp_path / 'here', tmp_path / 'run'
    here.mkdir()
    with membership.Membership(entry(share=0.5, model_dir=str(run)), MACHINE, beat_secs=0.05, folder=str(here)) as member:
        member.follow(lambda: 7)
        for folder in (here, run / 'sessions'):
            wait_for(lambda folder=folder: [seen.entry.step for seen in ledger.read(str(folder))] == [7])
            [seen] = ledger.read(str(folder))
            assert seen.lives and seen.silent_secs < 30 and seen.entry.pid == os.getpid()
    assert ledger.read(str(here)) == ledger.read(str(run / 'sessions')) == []
    assert not [name for name in os.listdir(here) if name != 'lock']


def test_an_own_session_does_not_count_against_another_of_the_process(tmp_path):
    with membership.Membership(entry(share=0.7, model_dir=''), MACHINE, folder=str(tmp_path)):
        with membership.Membership(entry(share=0.7, model_dir=''), MACHINE, folder=str(tmp_path)):
            assert len(ledger.read(str(tmp_path))) == 2


def test_a_run_directory_that_can_not_be_written_is_no_hindrance(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    with membership.Membership(entry(model_dir=str(tmp_path / 'file')), MACHINE, folder=str(tmp_path)):
        assert len(ledger.read(str(tmp_path))) == 1


HOLDER = """
import resource, sys, types
sys.modules['towers'] = package = types.ModuleType('towers')  # without TensorFlow, which takes seconds
package.__path__ = [sys.argv[1]]
from towers.sessions import admission, ledger, membership
asked = ledger.Entry(role='master', gpus=(0,), share=float(sys.argv[3]))
if len(sys.argv) > 4:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    with membership.Membership(asked, admission.Machine(0), folder=sys.argv[2], beat_secs=0.1):
        print('in', flush=True)
        sys.stdin.read()
except ValueError as error:
    print('refused', flush=True)
"""


def holder(folder, share, *more):
    command = [sys.executable, '-c', HOLDER, os.path.dirname(towers.__file__), str(folder), str(share), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_disk_that_takes_nothing_keeps_nobody_out(tmp_path):
    child = holder(tmp_path, 0.7, 'full')
    assert child.stdout.readline() == 'in\n'
    _, said = child.communicate(timeout=60)
    assert child.returncode == 0 and said.count('not registered on this machine') == 1
    assert os.listdir(tmp_path) == ['lock']


def test_a_killed_session_holds_nothing_a_stopped_one_does(tmp_path):
    child = holder(tmp_path, 0.7)
    try:
        assert child.stdout.readline() == 'in\n'
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(admission.Refused), membership.Membership(entry(share=0.5, model_dir=''), MACHINE, folder=str(tmp_path)):
            pass
        child.kill()
        child.wait()
        assert [row['state'] for row in report.rows(str(tmp_path))] == ['gone']
        with membership.Membership(entry(share=0.5, model_dir=''), MACHINE, folder=str(tmp_path)):
            assert [row['state'] for row in report.rows(str(tmp_path))] == ['live']
    finally:
        child.kill()
        child.communicate()


def test_of_many_that_start_at_once_only_so_many_as_fit_are_admitted(tmp_path):
    children = [holder(tmp_path, 0.4) for _ in range(5)]
    said = sorted(child.stdout.readline().strip() for child in children)
    for child in children:
        child.communicate(timeout=60)
    assert said == ['in', 'in', 'refused', 'refused', 'refused']
    assert ledger.read(str(tmp_path)) == []


def test_elsewhere_a_heartbeat_tells_who_lives(tmp_path):
    ledger.write(str(tmp_path), entry(machine='another', pid=99, share=0.7))
    [seen] = ledger.read(str(tmp_path))
    assert seen.lives
    os.utime(seen.path, (0, time.time() - ledger.SILENT_SECS - 1))
    assert [row['state'] for row in report.rows(str(tmp_path))] == ['gone']
    assert ledger.sweep(str(tmp_path)) == [] and os.listdir(tmp_path) == []


def test_a_later_process_of_the_same_number_is_another(tmp_path):
    ledger.write(str(tmp_path), entry(started=identity.start_of(os.getpid()) - 1))
    assert not ledger.read(str(tmp_path))[0].lives


@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'{"role": "a", "pid": "x"}', b'{"role": "a", "gpus": ["0"]}', b'\xff'])
def test_what_can_not_be_read_is_left_out(tmp_path, content):
    ledger.write(str(tmp_path), entry())
    (tmp_path / 'session-12-abc.json').write_bytes(content)
    (tmp_path / 'session-999999-abc.json.tmp').write_bytes(content)
    os.utime(tmp_path / 'session-999999-abc.json.tmp', (0, 0))
    assert len(ledger.sweep(str(tmp_path))) == 1
    assert not (tmp_path / 'session-999999-abc.json.tmp').exists()


def test_fields_of_a_later_version_are_passed_over(tmp_path):
    path = ledger.path_of(str(tmp_path), entry(token='abc'))
    with open(path, 'w') as file:
        json.dump({**dataclasses.asdict(entry(token='abc')), 'colour': 'red'}, file)
    assert ledger.read(str(tmp_path))[0].entry.token == 'abc'


@pytest.mark.parametrize('runtime', [True, False])
def test_the_ledger_of_the_machine_is_private(tmp_path, monkeypatch, runtime):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    folder = host.folder({'XDG_RUNTIME_DIR': str(tmp_path) if runtime else '/nowhere'})
    assert folder == str(tmp_path / ('towers' if runtime else f'towers-{os.getuid()}'))
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.chmod(folder, 0o777)
    assert host.folder({'XDG_RUNTIME_DIR': str(tmp_path) if runtime else ''}) == folder
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'towers').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(ValueError, match='must be a folder of yours; set XDG_RUNTIME_DIR'):
        host.folder({'XDG_RUNTIME_DIR': str(tmp_path)})


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(tmp_path, caplog):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with host.locked(str(tmp_path)):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    with caplog.at_level('WARNING'), host.locked(str(tmp_path), limit_secs=0.1):
        assert 'going on without' in caplog.text
    leave.set()
    thread.join(60)


@pytest.mark.parametrize(
    ('files', 'limit'),
    [
        ({}, 8),
        ({'groups/memory.max': 'max', 'groups/a/memory.max': f'{3 << 20}', 'groups/a/b/memory.max': 'max'}, 3),
        ({'groups/a/b/memory.max': f'{5 << 20}', 'groups/memory.max': f'{6 << 20}'}, 5),
        ({'groups/memory/memory.limit_in_bytes': f'{4 << 20}'}, 4),
        ({'groups/memory/memory.limit_in_bytes': '9223372036854771712'}, 8),
    ],
)
def test_the_limit_of_memory_is_the_least_of_the_control_groups(tmp_path, files, limit):
    files = {'proc/meminfo': 'MemTotal:        8192 kB\nMemFree: 1 kB\n', 'proc/self/cgroup': '0::/a/b\n', **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.limit_mb(proc=tmp_path / 'proc', groups=tmp_path / 'groups') == limit


def test_a_process_takes_memory_and_threads():
    assert memory.used_mb(os.getpid()) > 50
    assert memory.threads(os.getpid()) >= threading.active_count()
    assert memory.used_mb(-1) == memory.threads(-1) == 0
    assert memory.limit_mb() > 0


def wait_for(holds, secs=60):
    end = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
