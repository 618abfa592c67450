"""URLs as text: what lies in the folder that one names, and what of one may be shown.

    s3://key:secret@bucket/state?endpoint_override=127.0.0.1:9000

What stands behind the question mark says how a server is reached, and belongs to every URL inside the folder. A path of this machine has
no such part: there a question mark is a letter.
"""

from __future__ import annotations

import re

from headwater.model.errors import InvalidInput

_CUT_SECRET = re.compile(r"^(s3://[^/?#@:]*):[^/?#@]*/[^?#]*@")


def bare(folder: str) -> str:
    """A URL without what stands behind its question mark, a path as it is; both without a slash at the end."""
    return (folder.partition("?")[0] if "://" in folder else folder).rstrip("/")


def inside(folder: str, *names: str) -> str:
    """The URL, or the path, of what has these names in a folder."""
    _, mark, settings = folder.partition("?") if "://" in folder else ("", "", "")
    return "/".join([bare(folder), *names]) + mark + settings


def check_secret(url: str) -> None:
    """Refuses an S3 secret with a slash: the text before it would be the bucket, and the rest a path that errors show."""
    if _CUT_SECRET.search(url):
        raise InvalidInput(
            f"The secret in {without_password(url)} contains a slash, which ends the host part of a URL.",
            advice="Write the slash as %2F. Or leave out key and secret, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )


def said_of(url: str, error: Exception) -> str:
    """The first line of what a library says of a URL, as it may be shown."""
    return str(error).replace(url, without_password(url)).partition("\n")[0]


def without_password(url: str) -> str:
    """The URL as it may be shown: nothing between the user's name and the host, and no password among its parameters."""
    shown = re.sub(r"(://[^/?#]*?):[^/?#]*@", r"\1@", url)
    shown = _CUT_SECRET.sub(r"\1@", shown)
    return re.sub(r"([?&](?:password|passfile|sslpassword|client_secret|sig)=)[^&#]*", r"\1…", shown)
