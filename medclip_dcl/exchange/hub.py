"""Upload of an exported folder to the Hugging Face Hub, private unless asked otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.terms import SOURCE_CARD
from medclip_dcl.exchange.folder import FILES, exported_files

WARNING = (
    "weights and vocabulary derive from the reports and images of the training data, which may be credentialed: give "
    "access only to people whom the terms of these data allow"
)


def push_to_hub(folder: Path, repository: str, *, public: bool = False) -> str:
    """Upload the files of an exported folder to a repository ("owner/name"), made if needed; returns its address.

    Its visibility is never changed: a public one is refused unless `public`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    # Files of an earlier upload that this export does not have are of other weights.
    patterns: Any = {"allow_patterns": list(exported_files(folder)), "delete_patterns": [*FILES, SOURCE_CARD]}
    try:
        address = str(api.create_repo(repository, private=not public, exist_ok=True))
        if public or api.repo_info(repository).private:
            api.upload_folder(repo_id=repository, folder_path=folder, **patterns)
            return address
    # Without a network httpx's errors, which are not OSErrors; a bad name is a ValueError.
    except (HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{folder} was written, but not uploaded to {repository} ({reason}); check the name, the network and "
            "`hf auth login`, and run the command again"
        ) from error
    raise UserError(
        f"{repository} is public, and nothing was uploaded; make it private on the Hub, give another name, or add "
        "--public if the terms of the training data allow it"
    )
