"""Random changes of training images, drawn by example: the same for every number of towers, and after a resume.

They stand in a model, behind `if training`, since a draw belongs to a step and to an example's place in its batch.
"""

import tensorflow.compat.v1 as tf

import towers


def flip(images: tf.Tensor) -> tf.Tensor:
    """Mirrors half of the images, left to right: [B, H, W, C], returned in the same shape."""
    mirrored = towers.random_uniform(tf.shape(images)[0]) < 0.5  # [B], takes whole images
    return tf.where(mirrored, tf.reverse(images, [2]), images)


def pad_and_crop(images: tf.Tensor, pad: int = 4) -> tf.Tensor:
    """Moves each image by up to `pad` pixels in both directions; zeros come in (He et al. 2015, section 4.2).

    Args:
      images: [B, H, W, C], H and W known.
      pad: zeros on each side, of which a part of the image's size is cut out anywhere.

    Returns:
      A tensor shaped and typed as `images`.
    """
    height, width = images.shape.as_list()[1:3]
    places = towers.random_uniform(tf.shape(images)[0], [2], maxval=2 * pad + 1.0)
    first = tf.cast(tf.floor(places), tf.int32)  # [B, 2]
    padded = tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
    cut = tf.gather(padded, first[:, :1] + tf.range(height), axis=1, batch_dims=1)  # [B, H, W + 2 * pad, C]
    return tf.gather(cut, first[:, 1:] + tf.range(width), axis=2, batch_dims=1)
