"""Simulated steps against what can be worked out by hand."""

import dataclasses
import functools
import pathlib
import random
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

from scripts import _curve, _flags, _links, _network, _timeline, simulate  # noqa: E402
from towers import config  # noqa: E402

WORK = 10.0
PLAIN = _network.Setting(machines=1, towers=1, network=2.0, bus=4.0, memory=8.0, message=0.0, dispatch=0.0)
MEASURED = [
    (2, 'parameter_server', 1005), (3, 'parameter_server', 1980), (4, 'parameter_server', 2928),
    (2, 'mirrored', 597), (3, 'mirrored', 1548), (4, 'mirrored', 2349),
]  # fmt: skip
ONE = [_network.Weight('w', 8.0, 0.0, WORK)]  # read first, its gradient made last


def secs(weights=ONE, **changes):
    return _network.simulate(weights, WORK, dataclasses.replace(PLAIN, **changes)).secs


def test_one_tower_waits_for_its_weight_and_its_update():
    # To the machine 1, to the tower 2, work 10, from the tower 2, to the hub 1, one gradient and three passes 4.
    assert secs() == pytest.approx(20)


def test_more_towers_share_the_bus_and_are_summed_on_their_machine():
    # To the machine 1, to 3 towers 6, work 10, from them 6, summed (3 + 1) 4, to the hub 1, one gradient and three passes 4.
    assert secs(towers=3) == pytest.approx(32)


@pytest.mark.parametrize('machines', [2, 3, 5])
def test_machines_share_the_network_of_the_hub(machines):
    # All have their weight after 4 for each that is not the hub's; their gradients come likewise, at the same time.
    there = 4 * (machines - 1)
    assert secs(machines=machines) == pytest.approx(there + 2 + WORK + 2 + there + machines + 3)


def test_a_link_gives_each_of_its_users_an_equal_part():
    clock, ends = _links.Clock(), {}
    link = _links.Link('link', clock)

    def use(name, at, work):
        clock.after(at, 'start', lambda: link.use(work, lambda: ends.update({name: clock.now})))

    use('long', 0, 10)  # alone to 2, then a half of it, to 6 a third, and a half again
    use('short', 2, 3)
    use('late', 4, 6)
    clock.run()
    # At 2: 8 left of `long`. At 4: 7 and 2 left. At 10 `short` ends: 5 and 4. At 18 `late` ends: 1. At 19 the last.
    assert ends == pytest.approx({'short': 10, 'late': 18, 'long': 19})
    assert clock.waits() == pytest.approx({'start': 0, 'link': 19})


def test_what_waits_on_a_path_crosses_one_by_one_in_any_order():
    clock, ends = _links.Clock(), []
    path = _links.Path(_links.Link('link', clock), random.Random(5))
    for name in range(20):
        path.send(1.0, functools.partial(lambda name: ends.append((name, clock.now)), name))
    clock.run()
    assert [end for _, end in ends] == pytest.approx(range(1, 21))
    names = [name for name, _ in ends]
    assert names[0] == 0 and sorted(names) == list(range(20)) != names


@pytest.mark.parametrize(('machines', 'strategy', 'measured'), MEASURED)
def test_the_simulation_agrees_with_steps_over_throttled_links(machines, strategy, measured):
    """Medians in ms of a model of six weights of 4 MB on network namespaces, links of 400 Mbit/s; see BUILD_NOTES."""
    work = 0.02
    weights = [_network.Weight(f'w{at}', 4e6, work * at / 12, work * (12 - at) / 12) for at in range(6)]
    setting = _network.Setting(machines, 1, strategy, network=50e6)
    assert _network.simulate(weights, work, setting).secs * 1e3 == pytest.approx(measured, rel=0.2)


def test_mirrored_sends_the_sum_back():
    # Work 10, from the tower 2, over the network 4, two gradients added 2, over the network 4, to the tower 2.
    assert secs(machines=2, strategy='mirrored') == pytest.approx(24)


def test_what_is_needed_late_is_sent_while_the_tower_works():
    late = [_network.Weight('w', 8.0, 5.0, WORK)]
    assert secs(late) == pytest.approx(secs() - 3)  # it took 3 to arrive


def test_a_gradient_that_is_there_early_is_sent_while_the_tower_works():
    early = [_network.Weight('w', 8.0, 0.0, 2.0)]
    assert secs(early) == pytest.approx(3 + WORK)


def test_parameter_tasks_divide_the_load():
    weights = [_network.Weight(f'w{at}', 8.0, 0.0, WORK) for at in range(4)]
    one, two, four = (_network.simulate(weights, WORK, dataclasses.replace(PLAIN, machines=8, ps=ps)) for ps in (1, 2, 4))
    assert one.secs > two.secs > four.secs
    # Four weights to eight machines before the work, and their gradients behind it.
    found = [step.waits[way] * step.secs for step in (one, four) for way in ('network out', 'network in')]
    assert found == pytest.approx([128, 128, 32, 32])


def test_the_dispatch_and_the_messages_cost():
    assert secs(dispatch=0.5, machines=2) == pytest.approx(secs(machines=2) + 1)
    assert secs(message=0.5) == pytest.approx(secs() + 1)


def test_what_is_waited_for_is_named():
    step = _network.simulate(ONE, WORK, dataclasses.replace(PLAIN, machines=20))
    assert step.bottleneck in ('network out', 'network in')
    assert step.efficiency == pytest.approx(WORK / step.secs) and sum(step.waits.values()) == pytest.approx(1)
    assert step.waits['towers'] == pytest.approx(step.efficiency)
    fast = dataclasses.replace(PLAIN, network=1e9, bus=1e9, memory=1e9)
    assert _network.simulate(ONE, WORK, fast).bottleneck == 'towers'


@pytest.mark.parametrize(('text', 'found'), [('100Gb', 12.5e9), ('12GB', 12e9), ('1.5Mb', 187500.0), ('8b', 1.0)])
def test_a_rate_is_bits_or_bytes(text, found):
    assert _curve.rate('bandwidth', text) == found


@pytest.mark.parametrize('text', ['', '100', 'Gb', '0Gb', '-1Gb', '5Xb'])
def test_a_rate_that_is_neither_is_refused(text):
    with pytest.raises(ValueError, match='--bus wants bits or bytes a second'):
        _curve.rate('bus', text)


@pytest.mark.parametrize(
    ('given', 'shown'),
    [
        ([], ['parameter_server', 'mirrored']),
        (['--ps=2'], ['parameter_server']),
        (['--strategy=mirrored'], ['mirrored']),
        (['--strategy=parameter_server', '--ps=2'], ['parameter_server']),
    ],
    ids=range(4),
)
def test_the_strategies_that_are_asked_for_are_shown(monkeypatch, given, shown):
    assert [line.split()[2] for line in curve(monkeypatch, given)] == shown


@pytest.mark.parametrize('given', [['--strategy=collective'], ['--strategy=mirrored', '--ps=2']], ids=['collective', 'ps'])
def test_a_strategy_that_is_not_simulated_is_refused(monkeypatch, given):
    with pytest.raises(ValueError, match='--strategy wants parameter_server.* here, got (collective|mirrored); leave it out'):
        curve(monkeypatch, given)


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ('--machines=0', '--machines wants at least 1, got 0; give the largest'),
        ('--bandwidth=0Gb', '--bandwidth wants bits or bytes'),
        ('--strategy=collective', '--strategy wants parameter_server or mirrored'),
    ],
    ids=['machines', 'bandwidth', 'strategy'],
)
def test_what_can_not_be_shown_is_refused_before_anything_is_measured(monkeypatch, given, said):
    monkeypatch.setattr(_timeline, 'measure', lambda *_: pytest.fail('it was measured'))
    values = simulate.define()
    _flags.parse(values, ['', given])
    with pytest.raises(ValueError, match=said):
        next(_curve.lines(len, len, config.Config(num_gpus=1), values))


def curve(monkeypatch, given):
    """The rows of the table of one machine, for a tower that was measured elsewhere."""
    monkeypatch.setattr(_timeline, 'measure', lambda model, dataset, config: (ONE, WORK))
    values = simulate.define()
    _flags.parse(values, ['', '--bandwidth=8b', '--bus=1B', *given])
    return [line for line in _curve.lines(len, len, config.Config(num_gpus=1), values) if line.split()[0].isdigit()]
