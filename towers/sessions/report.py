"""What a ledger says, for people and for programs."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from towers.sessions import ledger, memory


def rows(folder: str) -> list[Mapping[str, Any]]:
    """A record for each session of a ledger's folder, the dead ones too, the oldest first.

    Returns:
      its entry's fields, and: state ('live', 'silent': its process is there and stopped beating, 'gone', or 'to come': its share is held
      by the process `pid`, which will start it), silent_secs, memory_used_mb and threads of its whole process, None where it is on
      another machine.
    """
    found = ledger.read(folder)
    waited = ledger.pending([seen.entry for seen in found if seen.lives])
    return [_row(seen) for seen in found if not (seen.lives and seen.entry.is_coming) or seen.entry in waited]


def json_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A JSON object a line."""
    return [json.dumps(row) for row in found]


def cells(found: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """The same as a heading and rows of text."""
    heading = ('session', 'state', 'process', 'host', 'GPUs', 'share', 'memory', 'threads', 'step', 'since', 'run directory')
    return [heading, *(_cells(row) for row in found)]


def _row(seen: ledger.Seen) -> Mapping[str, Any]:
    entry = seen.entry
    state = 'gone' if not seen.lives else 'silent' if seen.silent_secs >= ledger.SILENT_SECS else 'live'
    if state == 'live' and entry.is_coming:
        state = 'to come'
    here = entry.is_here and seen.lives and not entry.is_coming
    return {
        'role': entry.role,
        'name': entry.name,
        'state': state,
        'host': entry.host,
        'pid': entry.pid,
        'gpus': list(entry.gpus),
        'fake': entry.fake,
        'share': entry.share,
        'memory_mb': entry.memory_mb,
        'memory_used_mb': memory.used_mb(entry.pid) if here else None,
        'intra_op_threads': entry.intra_op_threads,
        'inter_op_threads': entry.inter_op_threads,
        'threads': memory.threads(entry.pid) if here else None,
        'step': entry.step,
        'since': entry.since,
        'silent_secs': round(seen.silent_secs, 1),
        'model_dir': entry.model_dir,
    }


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    fake = 'fake ' if row['fake'] and row['gpus'] else ''
    pools = '/'.join(str(row[name] or '*') for name in ('intra_op_threads', 'inter_op_threads'))
    state = row['state'] if row['state'] in ('live', 'to come') else f'{row["state"]} {row["silent_secs"]:.0f} s'
    return (
        f'{row["role"]} {row["name"]}'.strip(),
        state,
        str(row['pid']),
        row['host'],
        fake + (','.join(map(str, row['gpus'])) or '-'),
        '-' if row['share'] is None else f'{row["share"]:.2f}',
        '-' if row['memory_used_mb'] is None else f'{row["memory_used_mb"]} MiB',
        '-' if state == 'to come' else f'{pools} of {row["threads"] or "?"}',
        '-' if row['step'] is None else str(row['step']),
        time.strftime('%m-%d %H:%M:%S', time.localtime(row['since'])),
        row['model_dir'] or '-',
    )
