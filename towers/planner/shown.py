"""A plan for people and for programs."""

import dataclasses
import json
from typing import Any

from towers.planner import plan
from towers.sessions import admission

_UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
_BIGGEST = 5
_LEAST = 64 * 1024  # bytes


def lines(predicted: plan.Plan, real: plan.Plan | None = None) -> list[str]:
    """A table of the devices, with what was measured beside it, then transfers and the biggest tensors."""
    heading = ['device', 'parameters', 'slots', 'other state', 'in a step', 'in all', *(['measured', 'ratio'] if real else [])]
    rows = [heading]
    for name, need in predicted.devices.items():
        row = [name, *(size(part) for part in (need.parameters, need.slots, need.state, need.activations, need.total))]
        if real:
            row += [size(real.devices[name].total), f'{need.total / max(real.devices[name].total, 1):.2f}']
        rows.append(row)
    found = [*admission.columns(rows), '', f'Global batch: {size(predicted.batch)}; the input holds it, and some made ahead.']
    variables = sum(need.total - need.activations for need in predicted.devices.values())
    found.append(f'While a checkpoint is written: up to {size(variables)} more on the devices of the variables.')
    for (source, target), count in predicted.transfers.items():
        also = f' (measured {size(real.transfers.get((source, target), 0))})' if real else ''
        found.append(f'Each step brings {size(count)} from {source} to {target}{also}.')
    if any(need.total < _LEAST for need in predicted.devices.values()):
        found.append(f'A device with less than {size(_LEAST)} is not predicted well: there the order of a few operations decides.')
    return [*found, *_biggest(real or predicted)]


def as_json(predicted: plan.Plan, real: plan.Plan | None = None) -> str:
    """One JSON object: predicted, and measured where it was."""
    return json.dumps({'predicted': _fields(predicted), **({'measured': _fields(real)} if real else {})})


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f'{count:.0f} {_UNITS[unit]}' if count >= 100 or not unit else f'{count:.3g} {_UNITS[unit]}'


def _biggest(found: plan.Plan) -> list[str]:
    name = max(found.devices, key=lambda each: found.devices[each].activations)
    parts = [f'{operation} {size(count)}' for operation, count in found.biggest.get(name, ())[:_BIGGEST]]
    return [f'The biggest in a step on {name}: {", ".join(parts)}.'] if parts else []


def _fields(found: plan.Plan) -> dict[str, Any]:
    return {
        'devices': {name: {**dataclasses.asdict(need), 'total': need.total} for name, need in found.devices.items()},
        'transfers': [{'from': source, 'to': target, 'bytes': count} for (source, target), count in found.transfers.items()],
        'batch': found.batch,
        'biggest': {name: [list(pair) for pair in pairs[:_BIGGEST]] for name, pairs in found.biggest.items()},
    }
