"""Run directories that are URLs, such as `s3://bucket/runs`, and whether TensorBoard can write to them.

Does not import torch, and TensorBoard only for a URL.
"""

from __future__ import annotations

from pathlib import Path

from tbhooks.data.errors import ArgumentError

_SEPARATOR = "://"
# The packages with which TensorBoard writes to these file systems.
_PACKAGES = {"s3": "boto3 or s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_remote(directory: str) -> bool:
    """Whether this is a URL and not a path."""
    return _SEPARATOR in directory


def below(directory: str, name: str) -> str:
    """The path or URL of a directory in another one."""
    return f"{directory.rstrip('/')}/{name}" if is_remote(directory) else str(Path(directory) / name)


def check(directory: str | Path) -> None:
    """Raises an ArgumentError for a URL that TensorBoard has no file system for. Paths are not checked."""
    if isinstance(directory, Path):
        first = directory.parts[0] if directory.parts else ""
        if first.endswith(":") and len(first) > 2:
            raise ArgumentError(f"{str(directory)!r} is a URL as a Path: pass it as a str")
    elif is_remote(directory):
        _check(directory, directory.partition(_SEPARATOR)[0])


def _check(directory: str, scheme: str) -> None:
    from tensorboard.compat import tf  # noqa: PLC0415  imports TensorFlow if that is installed, which is slow

    files = tf.io.gfile
    try:
        if hasattr(files, "get_registered_schemes"):
            known = scheme in files.get_registered_schemes()
        else:
            known = files.get_filesystem(directory) is not None
        why = ""
    except Exception as problem:  # of any file system
        known, why = False, f" ({problem})"
    if not known:
        package = _PACKAGES.get(scheme)
        hint = f": pip install {package}" if package else why
        raise ArgumentError(f"TensorBoard cannot write to {directory!r}: it has no file system for {scheme}://{hint}")


def local(directory: str | Path) -> Path:
    """The path of a run to be read. Raises an ArgumentError for a URL."""
    if is_remote(str(directory)):
        raise ArgumentError(f"runs are read from a local directory: copy {str(directory)!r} to one first")
    return Path(directory)
