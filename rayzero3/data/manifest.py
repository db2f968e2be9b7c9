"""Manifest: what a folder of token shards holds, and the check that it holds just that.

    FOLDER/
        train-00000.parquet ...        one row a document: `tokens` list<uint16|uint32>, `length` int64
        validation-00000.parquet ...
        tokenizer.json                 of the `tokenizers` library
        manifest.json                  written last
        packing-SPLIT-LENGTH.npz       built at the first use of a sequence length, see rayzero3.data.pack
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayzero3.errors import DataError

FORMAT_VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": pa.uint16(), "uint32": pa.uint32()}
_AGAIN = "Write the folder anew with `rayzero3 tokenize`."


@dataclass(frozen=True)
class RowGroup:
    """What one row group of a shard holds."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class Shard:
    """One Parquet file of a split."""

    file: str
    row_groups: tuple[RowGroup, ...]

    @property
    def documents(self) -> int:
        return sum(group.documents for group in self.row_groups)

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.row_groups)


@dataclass(frozen=True)
class Manifest:
    """The description of a folder of token shards.

    Attributes:
        fingerprint: Of the inputs and settings that it was made from.
        tokenizer_sha256: Of tokenizer.json.
        vocab_size: Tokens of the tokenizer; every id is below it.
        eod_id: The token that ends every document.
        dtype: "uint16" or "uint32".
        skipped: Input files that were not text.
        splits: "train" and "validation" -> shards, in the order of the token stream.
    """

    fingerprint: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    dtype: str
    skipped: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]
    format: int = FORMAT_VERSION

    def tokens(self, split: str) -> int:
        """Tokens of a split, the ends of documents included."""
        return sum(shard.tokens for shard in self.splits[split])

    def documents(self, split: str) -> int:
        """Documents of a split."""
        return sum(shard.documents for shard in self.splits[split])

    def write(self, folder: Path) -> None:
        """Write manifest.json, in one rename."""
        temporary = folder / (MANIFEST + ".part")
        temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        os.replace(temporary, folder / MANIFEST)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read manifest.json. Raises DataError if the folder or the manifest is missing, broken, or of another version."""
        if not Path(folder).is_dir():
            raise DataError(f"the data folder {folder}", "missing", "expected a folder of token shards", "Write it with `rayzero3 tokenize INPUT --out FOLDER`.")
        try:
            raw = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
            if raw["format"] != FORMAT_VERSION:
                raise DataError(f"the format of {folder}", raw["format"], f"this version reads {FORMAT_VERSION}", _AGAIN)
            splits = {
                split: tuple(Shard(shard["file"], tuple(RowGroup(**group) for group in shard["row_groups"])) for shard in shards)
                for split, shards in raw.pop("splits").items()
            }
            if set(splits) != set(SPLITS) or raw["dtype"] not in DTYPES or not isinstance(raw["vocab_size"], int):
                raise ValueError("its splits, dtype or vocab_size are not what rayzero3 writes")
            return cls(splits=splits, skipped=tuple(raw.pop("skipped")), **raw)
        except FileNotFoundError:
            raise DataError(f"the data folder {folder} has no {MANIFEST}", None, "it holds no token shards, or an unfinished set", _AGAIN) from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise DataError(f"{Path(folder) / MANIFEST}", "broken", str(error), _AGAIN) from None


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Compare every shard with the manifest, by the files' footers alone: fast for any amount of data.

    Raises:
        DataError: a shard is missing, cut short, empty, of another dtype, or its counts differ; a token is not in the vocabulary (the
            error names file, row and value); the tokenizer is another one.
    """
    folder = Path(folder)
    if not manifest.tokens("train"):
        raise DataError(f"the training split of {folder}", "empty", "expected at least one document", "Tokenize more text.")
    if not (folder / TOKENIZER).exists() or sha256(folder / TOKENIZER) != manifest.tokenizer_sha256:
        raise DataError(f"{folder / TOKENIZER}", "missing or changed", "the shards were made with another one", _AGAIN)
    for shards in manifest.splits.values():
        for shard in shards:
            _check_shard(folder / shard.file, shard, manifest)


def _check_shard(path: Path, shard: Shard, manifest: Manifest) -> None:
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise DataError(f"{path}", "missing", "the manifest lists it", _AGAIN) from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}", "not a whole Parquet file", str(error).splitlines()[0], _AGAIN) from None
    with file:
        dtype = file.schema_arrow.field("tokens").type if "tokens" in file.schema_arrow.names else None
        if "length" not in file.schema_arrow.names:
            raise DataError(f"the column length of {path}", "missing", "every shard has it", _AGAIN)
        if dtype != pa.list_(DTYPES[manifest.dtype]):
            raise DataError(f"the column tokens of {path}", dtype or "missing", f"the manifest says list<{manifest.dtype}>", _AGAIN)
        if not shard.documents or file.metadata.num_rows != shard.documents:
            raise DataError(f"the number of documents in {path}", file.metadata.num_rows, f"the manifest says {shard.documents}, and never 0", _AGAIN)
        if file.num_row_groups != len(shard.row_groups):
            raise DataError(f"the number of row groups in {path}", file.num_row_groups, f"the manifest says {len(shard.row_groups)}", _AGAIN)
        leaf = [file.metadata.row_group(0).column(i).path_in_schema.split(".")[0] for i in range(file.metadata.num_columns)].index("tokens")
        for index, group in enumerate(shard.row_groups):
            column = file.metadata.row_group(index).column(leaf)
            if (file.metadata.row_group(index).num_rows, column.num_values) != (group.documents, group.tokens):
                raise DataError(f"row group {index} of {path}", f"{column.num_values} tokens", f"the manifest says {group.tokens}", _AGAIN)
            if column.statistics is None or column.statistics.max >= manifest.vocab_size:
                _name_bad_token(path, file, index, manifest)


def _name_bad_token(path: Path, file: pq.ParquetFile, index: int, manifest: Manifest) -> None:
    before = sum(file.metadata.row_group(earlier).num_rows for earlier in range(index))
    for row, tokens in enumerate(file.read_row_group(index, columns=["tokens"]).column("tokens")):
        values = tokens.values.to_numpy(zero_copy_only=False)
        if (values >= manifest.vocab_size).any():
            bad = int(values[values >= manifest.vocab_size][0])
            raise DataError(f"a token in row {before + row} of {path}", bad, f"the vocabulary has {manifest.vocab_size} tokens", _AGAIN)
