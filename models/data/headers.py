"""The size of an encoded image, read from its first bytes."""

import struct

_PNG, _GIF, _BMP, _JPEG = b'\x89PNG\r\n\x1a\n', b'GIF8', b'BM', b'\xff\xd8'
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # markers among those of frames that start none


def size(content: bytes) -> tuple[int, int] | None:
    """(height, width) of a PNG, JPEG, GIF or BMP image; None where `content` is none of them, or too short."""
    try:
        if content.startswith(_PNG):
            width, height = struct.unpack_from('>II', content, 16)
        elif content.startswith(_GIF):
            width, height = struct.unpack_from('<HH', content, 6)
        elif content.startswith(_BMP):
            width, height = struct.unpack_from('<ii', content, 18)
        elif content.startswith(_JPEG):
            height, width = _jpeg(content)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return abs(height), width


def _jpeg(content: bytes) -> tuple[int, int]:
    """Height and width from the start of the frame (ITU-T T.81, annex B)."""
    position = 2
    while True:
        while content[position] == 0xFF:
            position += 1
        marker = content[position]
        length, _, height, width = struct.unpack_from('>HBHH', content, position + 1)
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            return height, width
        position += 1 + length
