"""The loop in the graph: what it copies, where that stands, and that the step beside it stays as it is."""

import collections

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import loop, marks
from towers.jobs import program, training

EXAMPLES = np.arange(24, dtype=np.float32).reshape(8, 3)


def model(x, *, training):
    hidden = tf.nn.relu(tf.matmul(x, tf.get_variable('w', [3, 4])) + tf.get_variable('b', [4]))
    return towers.ModelOutput(tf.reduce_mean(tf.square(towers.dropout(hidden, 0.2, training=training))))


def made(n=2, strategy='parameter_server', **changes):
    return program.make(model, harness.rows(EXAMPLES), harness.config(strategy, n, global_batch_size=8, **changes))


def looped(*, n=2, strategy='parameter_server', **changes):
    """A program, its loop, and the operations of the loop."""
    found = made(n, strategy, **changes)
    before = len(found.graph.get_operations())
    with found.graph.as_default():
        return found, loop.make(found.step, marks.whole(found.step)), found.graph.get_operations()[before:]


def nodes(steps, folder):
    """The graph of a training session, by name; functions are numbered over the whole process, so datasets are left out."""
    settings = harness.config('parameter_server', 2, global_batch_size=8, model_dir=str(folder), steps_per_run=steps)
    found = program.make(model, harness.rows(EXAMPLES), settings)
    with training.opened(found, settings):
        return {node.name: node for node in found.graph.as_graph_def().node if not node.op.endswith('Dataset')}


def test_the_step_stays_as_it_is_and_calls_of_one_step_have_no_loop(tmp_path):
    plain, several = nodes(1, tmp_path / 'plain'), nodes(5, tmp_path / 'several')
    added = several.keys() - plain.keys()
    assert added and all(name.startswith('loop/') for name in added)
    assert plain == {name: node for name, node in several.items() if name not in added}


@pytest.mark.parametrize('strategy', harness.STRATEGIES)
def test_copies_stand_where_the_step_does_and_wait_for_the_loop(strategy):
    found, made_loop, added = looped(n=3, strategy=strategy)
    copies = {op.name.removeprefix(loop.COPIES): op for op in added if op.name.startswith(loop.COPIES)}
    step = {name: found.graph.get_operation_by_name(name) for name in made_loop.parts if name in copies}
    assert {name: (copies[name].type, copies[name].device) for name in step} == {name: (op.type, op.device) for name, op in step.items()}
    for name in step:
        assert copies[name].inputs or copies[name].control_inputs, name  # or it would run outside of the loop
    kinds = collections.Counter(op.type for op in step.values())
    assert not kinds['VarHandleOp'] and not kinds['IteratorV2'] and kinds['IteratorGetNext'] + kinds['IteratorGetNextSync'] == 1


def test_each_further_tower_adds_the_same_number_of_operations():
    counts = {n: len(looped(n=n)[2]) for n in (2, 3, 4, 8)}
    assert counts[4] - counts[3] == counts[3] - counts[2] and counts[8] - counts[4] == 4 * (counts[4] - counts[3])


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 1), ('parameter_server', 4), ('mirrored', 2)])
def test_how_many_operations_a_loop_has_besides_its_copies(strategy, n):
    _, made_loop, added = looped(n=n, strategy=strategy)
    copied = [op for op in added if op.name.removeprefix(loop.COPIES) in made_loop.parts]
    entered = [op for op in added if op.type == 'Enter']
    assert len(added) - len(copied) - len(entered) == 64 + 5 * (n if n > 1 else 0)  # a tower's device has a way back of its own


def test_a_loop_makes_as_many_steps_as_it_is_told_and_says_so():
    found, made_loop, _ = looped(optimizer='momentum')
    with found.graph.as_default(), tf.Session(graph=found.graph, config=found.proto) as session:
        init = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
        session.run(init)
        session.run(found.step.input.initializer)
        step = made_loop.results[found.step.step.name]
        for most, reached in ((3, 3), (1, 4), (10, 14)):
            session.run(made_loop.set_most, {made_loop.given: most})
            assert session.run((step, made_loop.made)) == (reached, reached)
        session.run(made_loop.stop)  # from now on each makes the one that it has begun
        assert session.run((step, made_loop.made)) == (15, 15)
        kept = session.run(made_loop.kept)
        assert kept[found.step.step.name] == 15 and kept[found.step.report['examples_seen'].name] == 120
