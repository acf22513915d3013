"""One request by an official Python SDK of whatever version PYTHONPATH brings, its retries at the defaults.

A job as JSON on standard input; on standard output what the app would have seen: the exception's class and text, how
often it was sent, and what was delivered before.
"""

import importlib
import json
import sys
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    sdk = importlib.import_module(job["sdk"])
    sent: list[str] = []
    client = (sdk.OpenAI if job["sdk"] == "openai" else sdk.Anthropic)(api_key="k", base_url=job["base_url"])
    client._prepare_request = lambda request: sent.append(str(request.url))
    create = client.chat.completions.create if job["sdk"] == "openai" else client.messages.create
    shown: list[Any] = []
    error: dict[str, str] | None = None
    try:
        if job["asked"].get("stream"):
            shown += [event.model_dump(mode="json") for event in create(**job["asked"])]
        else:
            shown.append(create(**job["asked"]).model_dump(mode="json"))
    except sdk.APIError as raised:
        error = {"name": type(raised).__name__, "text": str(raised)}
    print(json.dumps({"version": sdk.__version__, "sent": len(sent), "shown": shown, "error": error}))


if __name__ == "__main__":
    main()
