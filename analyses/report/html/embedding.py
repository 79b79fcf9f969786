"""Scripts and data for embedding in a page: nothing in them can end their element."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any


def embeddable_script(code: str) -> str:
    """Return JavaScript that is safe in a script element."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def script_digest(script: str) -> str:
    """Return the source expression by which a Content Security Policy allows a script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def embeddable_json(value: Any) -> str:
    """Return JSON that is safe in a script element: it has no character special to HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
