"""Directories that are URLs, such as `s3://bucket/runs`: whether TensorBoard can write there, and how to name more.

Nothing here needs torch, and TensorBoard is loaded only for a URL.
"""

from __future__ import annotations

from pathlib import Path

from tbhooks.data.errors import ArgumentError

_SEPARATOR = "://"
# What gives TensorBoard the most used file systems.
_PACKAGES = {"s3": "boto3 or s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_remote(directory: str) -> bool:
    """Whether it is a URL, and no path."""
    return _SEPARATOR in directory


def below(directory: str, name: str) -> str:
    """A directory in another one."""
    return f"{directory.rstrip('/')}/{name}" if is_remote(directory) else str(Path(directory) / name)


def check(directory: str | Path) -> None:
    """Raises an ArgumentError for a URL that TensorBoard has no file system for; says nothing of others."""
    if isinstance(directory, Path):
        first = directory.parts[0] if directory.parts else ""
        if first.endswith(":") and len(first) > 2:
            raise ArgumentError(f"{str(directory)!r} was a URL before it became a Path: give it as a str")
    elif is_remote(directory):
        _check(directory, directory.partition(_SEPARATOR)[0])


def _check(directory: str, scheme: str) -> None:
    from tensorboard.compat import tf  # noqa: PLC0415  TensorFlow's own where it is installed, which is slow to import

    files = tf.io.gfile
    try:
        if hasattr(files, "get_registered_schemes"):
            known = scheme in files.get_registered_schemes()
        else:
            known = files.get_filesystem(directory) is not None
        why = ""
    except Exception as problem:  # of whatever file system it is
        known, why = False, f" ({problem})"
    if not known:
        package = _PACKAGES.get(scheme)
        hint = f": pip install {package}" if package else why
        raise ArgumentError(f"TensorBoard cannot write to {directory!r}: it has no file system for {scheme}://{hint}")


def local(directory: str | Path) -> Path:
    """The path of a run that is to be read; an ArgumentError for a URL."""
    if is_remote(str(directory)):
        raise ArgumentError(f"runs are read from this machine's disk: copy {str(directory)!r} to it first")
    return Path(directory)
