"""The sides by name; the first is what the others are compared with unless --sides says otherwise."""

from scripts._bench import peers, sides

SIDES = {
    'one device': sides.one_device,
    'towers': sides.product,
    'classic': sides.classic,
    'classic, same threads': sides.classic_threads,
    'MirroredStrategy': peers.mirrored,
    'Keras fit': peers.keras_fit,
}
