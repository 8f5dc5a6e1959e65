"""Checkpoints that are whole or not there: written beside the training, found again by their manifests.

```
variables, position -> snapshot -> saver -> ckpt-<step>.{data,index} -> ckpt-<step>.json -> checkpoint    (in this order)
                                     `- retention                              |
variables, position <- restore <- the newest whole one <------------------ manifest
```
"""

from towers.checkpoint import manifest, restore, saver

__all__ = ['manifest', 'restore', 'saver']
