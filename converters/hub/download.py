"""Download a checkpoint from the Hugging Face hub: weights as safetensors, config and tokenizer; nothing executable."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeinfer.base.process import say
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.errors import CheckpointError, ModelNotFoundError
from edgeinfer.graph import builtin_shapes
from edgeinfer.text import FOLDER

from ..checkpoint.json_file import CONFIG_FILE

PATTERNS = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "LICENSE*", "README.md",
    f"{FOLDER}/*.jinja",
]
ATTEMPT_SECONDS = 5.0
"""Timeout of the first request to the hub; the client's own retries would take half a minute."""


def fetch(repo_id: str, revision: str | None = None, progress: OnStageProgress | None = None) -> Path:
    """Download a model of the hub into its cache, or find it there.

    HF_ENDPOINT, HF_HOME and HF_TOKEN are honoured. With HF_HUB_OFFLINE, or where the hub does not answer one short
    question, the copy in its cache is taken.

    Parameters
    ----------
    repo_id : str
        Such as ``HuggingFaceTB/SmolLM2-135M``.
    revision : str, optional
        Branch, tag or commit; the default branch if not given.
    progress : callable, optional
        Called with (done_bytes, total_bytes, repo_id); the total grows while files are discovered.

    Returns
    -------
    Path
        A checkpoint directory.

    Raises
    ------
    ModelNotFoundError
        If the hub has no such model or revision, or asks for permission to read it.
    CheckpointError
        If the hub cannot be reached and the model is not in the cache, or has no config.json.
    """
    import huggingface_hub

    with asking(repo_id, revision) as cached:
        folder = Path(huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=PATTERNS, tqdm_class=reporter(progress, repo_id),
            local_files_only=cached, etag_timeout=ATTEMPT_SECONDS,
        ))
    if not (folder / CONFIG_FILE).is_file():
        raise _no_config(repo_id)
    return folder


def fetch_config(repo_id: str, revision: str | None = None) -> Path:
    """Download only the config.json of a model of the hub, or find it in the hub's cache; raises as `fetch`."""
    import huggingface_hub

    with asking(repo_id, revision) as cached:
        return Path(huggingface_hub.hf_hub_download(
            repo_id, CONFIG_FILE, revision=revision, local_files_only=cached, etag_timeout=ATTEMPT_SECONDS
        ))


@contextmanager
def asking(repo_id: str, revision: str | None) -> Iterator[bool]:
    """Report in one sentence why the hub refuses; return whether only its cache is available."""
    from huggingface_hub import constants, errors

    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", repo_id):
        raise ModelNotFoundError(f"{repo_id!r} is not the name of a model on the hub; names look like owner/model.")
    offline = bool(constants.HF_HUB_OFFLINE)
    why = "" if offline else _silence(repo_id, revision or "main")
    log = logging.getLogger("huggingface_hub")  # it logs each new attempt; here an error is reported once
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield offline or bool(why)
        if why:
            say(f"the hub cannot be reached ({why}); {repo_id} is the copy in its cache")
    except errors.GatedRepoError:
        raise ModelNotFoundError(
            f"The model {repo_id} requires permission: accept its terms on the hub, then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFoundError(f"The model {repo_id} has no revision {revision!r} on the hub.") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"The hub has no model {repo_id}, or it is private: check the name, or log in."
        ) from None
    except errors.LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE forbids access to the hub: unset it" if offline else (
            f"the hub cannot be reached{why and f' ({why})'}: connect")
        raise CheckpointError(f"The model {repo_id} is not in the hub's cache, and {reason}, or give a directory"
                              f"{_shape(repo_id)}.") from None
    except errors.EntryNotFoundError:
        raise _no_config(repo_id) from None
    except Exception as error:  # of the HTTP library, which is another one in each version of the client
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"Cannot download {repo_id}: {reason}.") from None
    finally:
        log.setLevel(level)


def _silence(repo_id: str, revision: str) -> str:
    """Ask the hub once, and return why it does not answer; empty if it does.

    In a thread, because looking up a name takes as long as the system likes.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session

    url, answers = hf_hub_url(repo_id, CONFIG_FILE, revision=revision), []

    def ask() -> None:
        try:
            status = get_session().head(url, timeout=ATTEMPT_SECONDS).status_code
            answers.append("" if status < 500 else f"it answers with the error {status}")
        except Exception as error:  # of the HTTP library, which is another one in each version of the client
            kind = type(error).__name__
            answers.append(f"no answer within {ATTEMPT_SECONDS:g} s" if "Timeout" in kind else "no connection")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ATTEMPT_SECONDS + 1)
    return answers[0] if answers else f"no answer within {ATTEMPT_SECONDS:g} s"


def _shape(repo_id: str) -> str:
    """Suggest commands that work without the hub if the model's shape is built in; appended to a remedy."""
    name = repo_id.rpartition("/")[2].lower()
    known = [shape.name for shape in builtin_shapes().values()
             if shape.source.lower() == repo_id.lower() or f"{name}-".startswith(f"{shape.name}-")]
    if not known:
        return ""
    shape = max(known, key=len)
    return f"; its shape is built in: edgeinfer plan {shape}, edgeinfer estimate {shape}"


def _no_config(repo_id: str) -> CheckpointError:
    return CheckpointError(f"The model {repo_id} on the hub has no {CONFIG_FILE}, so it is no checkpoint.")


def reporter(progress: OnStageProgress | None, repo_id: str) -> Any:
    """A silent stand-in for the hub's progress bars that passes the count of bytes on."""
    from huggingface_hub.utils import tqdm

    counted: dict[int, tuple[int, int]] = {}  # the client counts the same bytes in one bar or in two

    class Reporter(tqdm):
        def __init__(self, *args: Any, **options: Any):
            self._bytes = options.get("unit") == "B"
            options["disable"] = True
            super().__init__(*args, **options)
            self._count, self._size = options.get("initial", 0), options.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self._count += n or 0
            if progress and self._bytes:
                counted[id(self)] = (int(self._count), int(self.total or self._size))
                done, total = (max(column) for column in zip(*counted.values(), strict=True))
                progress(done, max(total, done), repo_id)

    return Reporter
