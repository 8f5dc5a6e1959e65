"""A matrix as a picture for TensorBoard, made without a graph."""

import struct
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

_LEAST_SIDE = 256  # pixels


def of(matrix: np.ndarray) -> tf.Summary.Image:
    """A grey square for each entry: white is none, black is all of its row; rows go down, as they are printed."""
    shares = np.nan_to_num(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-30)).clip(0, 1)
    scale = max(1, _LEAST_SIDE // max(matrix.shape))
    grey = np.round(255 * (1 - shares)).astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)
    return tf.Summary.Image(height=grey.shape[0], width=grey.shape[1], colorspace=1, encoded_image_string=_png(grey))


def _png(grey: np.ndarray) -> bytes:
    """PNG of [height, width] bytes: 8 bits of grey, rows unfiltered."""
    header = struct.pack('>IIBBBBB', grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    rows = b''.join(b'\0' + row.tobytes() for row in grey)
    chunks = ((b'IHDR', header), (b'IDAT', zlib.compress(rows)), (b'IEND', b''))
    return b'\x89PNG\r\n\x1a\n' + b''.join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
