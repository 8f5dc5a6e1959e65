"""Measures Towers: python scripts/benchmark.py --num_gpus=4.

By default what the product costs over a bare prepared callable on the same graph (model and dataset by flags), then the workloads
against one device, the classic loop and tf.distribute, each side in a process of its own, in turn, for about an hour; --workloads=w1
--towers=4 --sources=constants is one case of 32, of a minute or two. With --measure=evaluator the training of the flags with an evaluator
that always has something to evaluate, against without; with --measure=machines over two processes of this machine, against one; with
--measure=soak for --secs seconds, failing where time or memory of a step grow.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _main
from scripts._bench import beside, checkouts, machines, options, overhead, pipeline, profile, report, sides, soak, suite, workloads


def main(values: flags.FlagValues) -> int:
    """Measures what is asked for and prints it as it comes."""
    names, before = options.names(values), report.read(values.compare) if values.compare else []
    rows, out, code = list[report.Row](), report.Out(values.out), _main.DONE
    checkouts.try_out(names.peers)
    if values.input:
        _main.print_table(pipeline.measure(values, rounds=values.rounds, steps=values.slice_steps))
        return _main.DONE
    if 'overhead' in names.parts:
        _main.print_table(overhead.measure(values, rounds=values.rounds, steps=values.slice_steps))
    if 'evaluator' in names.parts:
        _main.print_table(beside.measure(values, sys.argv, rounds=values.rounds))
    if 'machines' in names.parts:
        _main.print_table(machines.measure(values, rounds=values.rounds, steps=values.slice_steps))
    if 'soak' in names.parts:
        slopes, exceeded = soak.measure(values, secs=values.secs)
        _main.print_table(slopes)
        if exceeded:
            print(f'More than it may: {", ".join(exceeded)}.', file=sys.stderr)
            return _main.FAILED
    for workload, towers, source in names.cases:
        if values.profile:
            print(f'\n{workload} x {towers}, {source}')
            _main.print_table(profile.measure(sides.Case(workloads.WORKLOADS[workload], towers, source)))
        elif 'sides' in names.parts:
            measured = suite.measure((workload, towers, source), names.sides, rounds=values.rounds, checkouts=names.peers)
            print('\n' + report.table(measured), flush=True)
            rows += measured
            code = code if measured else _main.FAILED
            out.add(measured)
    for line in report.moved(before, rows):
        print(line)
    out.close()
    return code


if __name__ == '__main__':
    _main.run(main, options.define(), __doc__)
