"""Notes of the Hugging Face hub beside downloaded files, as `hf download --local-dir` leaves them."""

from pathlib import Path


def note_commit(folder: Path, file: str, commit: str) -> None:
    """Note the commit that `folder/file` came from; the file itself is left as it is."""
    path = folder / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{commit}\netag\n1700000000.0\n")
