"""Tokenize: text files or JSONL into Parquet token shards and their manifest, with Ray Data.

The result is a function of the inputs and the settings: neither the number of CPUs nor the order in which tasks end changes a byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rayzero3.data.documents import UNREADABLE, Unit, find_files, is_validation, read_documents, shard_units
from rayzero3.data.manifest import DTYPES, MANIFEST, SPLITS, TOKENIZER, Manifest, RowGroup, Shard, sha256
from rayzero3.data.tokenizer import encode, read_tokenizer
from rayzero3.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_OURS = re.compile(r"(train|validation)-\d{5}\.parquet(\.part)?|packing-(train|validation)-\d+(\.\d+)?\.(npz|part)")
_ROW_GROUP_TOKENS = 2**15
_TRAINING_BYTES = 2**26
"""Text that a tokenizer is trained on, at most."""


def tokenize(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    pattern: str = "*.txt",
    validation_fraction: float = 0.05,
    text_key: str = "text",
    exclude: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Write token shards of some texts. Ray must be initialised.

    A text file is a document; a line of a JSONL file is one. Files that are not UTF-8, or may not be read, are skipped and listed in the manifest.
    A document begins with what the tokenizer's template puts there and ends with its end; it goes to the validation split by a hash of its text.
    If `out` already holds shards of the same inputs and settings, they are kept.

    Args:
        inputs: Files and folders.
        out: Folder of the shards; older shards in it are replaced.
        tokenizer: A tokenizer.json of the `tokenizers` library; None trains a byte-level BPE on the training documents.
        vocab_size: Tokens of the BPE; needed if and only if `tokenizer` is None.
        pattern, exclude: Globs for the files in folders.
        validation_fraction: Of the documents, in [0, 1).
        text_key: Of a JSONL line's text.
        tell: Called with a line about each stage.

    Raises:
        DataError: an input, a line, a setting or the tokenizer is wrong.
    """
    files = check_inputs(inputs, tokenizer, vocab_size, pattern, validation_fraction, exclude)
    settings = [vocab_size, sha256(tokenizer) if tokenizer else None, validation_fraction, text_key]
    hashes = _in_parallel(_hash_file, [{"path": str(path)} for path, _ in files])
    fingerprint = hashlib.sha256(json.dumps([settings, [[name, digest] for (_, name), digest in zip(files, hashes, strict=True)]]).encode()).hexdigest()
    if (manifest := _reusable(out, fingerprint)) is not None:
        tell(f"{out} holds the shards of these inputs already")
        return manifest
    shards = shard_units(files)
    if tokenizer is None:
        tell(f"training a tokenizer of {vocab_size} tokens")
        model = _train(shards, vocab_size, validation_fraction, text_key)
    else:
        model = read_tokenizer(tokenizer)
    end, size = _end_of_document(model, tokenizer), model.get_vocab_size()
    out.mkdir(parents=True, exist_ok=True)
    _clear(out)
    model.save(str(out / TOKENIZER))
    tell(f"tokenizing {len(files)} files into {len(shards)} shards")
    dtype = "uint16" if size <= 2**16 else "uint32"
    write = partial(_write_shard, out=str(out), end=end, dtype=dtype, fraction=validation_fraction, text_key=text_key)
    results = _in_parallel(write, [{"index": index, "units": [asdict(unit) for unit in units]} for index, units in enumerate(shards)])
    manifest = Manifest(
        fingerprint=fingerprint,
        tokenizer_sha256=sha256(out / TOKENIZER),
        vocab_size=size,
        eod_id=end,
        dtype=dtype,
        skipped=tuple(dict.fromkeys(name for result in results for name in result["skipped"])),
        splits={
            split: tuple(Shard(_file(split, index), tuple(RowGroup(*group) for group in result[split])) for index, result in enumerate(results) if result[split])
            for split in SPLITS
        },
    )
    manifest.write(out)
    return manifest


def check_inputs(
    inputs: Sequence[Path], tokenizer: Path | None, vocab_size: int | None, pattern: str, validation_fraction: float, exclude: Sequence[str]
) -> list[tuple[Path, str]]:
    """The files that `tokenize` would read, and their names. No Ray. Raises DataError as it does, as far as can be told without opening them."""
    if (tokenizer is None) == (vocab_size is None):
        raise DataError("the tokenizer", None, "expected either a tokenizer file or a vocabulary size to train one", "Give one of --tokenizer, --vocab-size.")
    if vocab_size is not None and vocab_size < 257:
        raise DataError("the vocabulary size", vocab_size, "expected at least 257: every byte and the end of a document", "Raise --vocab-size.")
    if not 0 <= validation_fraction < 1:
        raise DataError("the validation fraction", validation_fraction, "expected at least 0 and below 1", "Try --validation-fraction 0.05.")
    if tokenizer is not None and not Path(tokenizer).is_file():
        folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
        raise DataError(f"the tokenizer {tokenizer}", "a folder" if folder == Path(tokenizer) else "missing", "expected a tokenizer.json file", _tokenizer_of(folder))
    if tokenizer is not None:
        _end_of_document(read_tokenizer(tokenizer), tokenizer)
    return find_files(inputs, pattern, exclude)


def _tokenizer_of(folder: Path) -> str:
    """How to come by a folder's tokenizer.json."""
    if (folder / TOKENIZER).is_file():
        return f"Give {folder / TOKENIZER}."
    if folder.is_dir():
        return f"Where transformers can load it, AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) writes one."
    return "Check the path."


def _in_parallel(function: Callable[[dict], Any], items: list[dict]) -> list[Any]:
    """`function` of every item as a Ray Data task, results in the order of the items. An error of ours comes back whole."""

    def task(row: dict[str, Any]) -> dict[str, str]:
        try:
            return {"index": row["index"], "result": json.dumps({"value": function(json.loads(row["item"]))})}
        except DataError as error:
            return {"index": row["index"], "result": json.dumps({"error": error.args})}

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        rows = ray.data.from_items(
            [{"index": index, "item": json.dumps(item)} for index, item in enumerate(items)], override_num_blocks=min(len(items), 64)
        )
        answers = sorted(rows.map(task).take_all(), key=lambda row: row["index"])
    finally:
        context.enable_progress_bars = shown
    results = [json.loads(answer["result"]) for answer in answers]
    for result in results:
        if "error" in result:
            raise DataError(*result["error"])
    return [result["value"] for result in results]


def _hash_file(item: dict[str, str]) -> str:
    try:
        return sha256(Path(item["path"]))
    except PermissionError:
        return "not readable"


def _reusable(out: Path, fingerprint: str) -> Manifest | None:
    if not (out / MANIFEST).exists():
        return None
    try:
        manifest = Manifest.load(out)
    except DataError:
        return None
    return manifest if manifest.fingerprint == fingerprint else None


def _clear(out: Path) -> None:
    """Remove older shards, their manifest first, so that a half-cleared folder is not taken for a whole one."""
    (out / MANIFEST).unlink(missing_ok=True)
    for path in out.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()


def _train(shards: list[list[Unit]], vocab_size: int, fraction: float, text_key: str) -> Tokenizer:
    """A byte-level BPE from the training documents, a sample of them in an order that a hash decides if they are many."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    units = sorted((unit for shard in shards for unit in shard), key=lambda unit: hashlib.blake2b(f"{unit.name}/{unit.start}".encode()).digest())

    def texts() -> Iterator[str]:
        left = _TRAINING_BYTES
        for unit in units:
            try:
                for text in read_documents(unit, text_key):
                    if not is_validation(text, fraction):
                        yield text
                        left -= len(text)
            except UNREADABLE:
                continue
            if left <= 0:
                return

    model.train_from_iterator(texts(), trainer)
    return model


def _end_of_document(model: Tokenizer, path: Path | None) -> int:
    for token in _KNOWN_ENDS:
        if (number := model.token_to_id(token)) is not None:
            return number
    raise DataError(f"the tokenizer {path} has no token that ends a document", None, f"expected one of {', '.join(_KNOWN_ENDS)}", "Add one to it.")


def _file(split: str, index: int) -> str:
    return f"{split}-{index:05d}.parquet"


def _write_shard(item: dict[str, Any], out: str, end: int, dtype: str, fraction: float, text_key: str) -> dict[str, Any]:
    """Tokenize the units of one shard; per split the (documents, tokens) of each row group, and the files that were no text."""
    model = read_tokenizer(Path(out, TOKENIZER))
    model.encode_special_tokens = True  # text that looks like a special token stays text
    skipped: list[str] = []
    documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for unit in (Unit(**unit) for unit in item["units"]):
        try:
            for text in read_documents(unit, text_key):
                documents[SPLITS[is_validation(text, fraction)]].append(np.array([*encode(model, text), end], dtype=dtype))
        except UNREADABLE:
            skipped.append(unit.name)
    return {"skipped": skipped} | {split: _write_split(Path(out, _file(split, item["index"])), documents[split], dtype) for split in SPLITS}


def _write_split(path: Path, documents: list[np.ndarray], dtype: str) -> list[tuple[int, int]]:
    """Write one Parquet file, in one rename, if there are documents. Plain encoding and no compression: reading is a copy."""
    if not documents:
        return []
    schema = pa.schema([("tokens", pa.list_(DTYPES[dtype])), ("length", pa.int64())])
    temporary, groups, waiting, count = path.with_suffix(".parquet.part"), [], [], 0
    with pq.ParquetWriter(temporary, schema, compression="none", use_dictionary=False, write_page_checksum=True) as writer:
        for number, document in enumerate(documents):
            waiting.append(document)
            count += len(document)
            if count >= _ROW_GROUP_TOKENS or number == len(documents) - 1:
                lengths = np.array([len(tokens) for tokens in waiting], dtype=np.int64)
                offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
                tokens = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(waiting)))
                writer.write_table(pa.table([tokens, pa.array(lengths)], schema=schema), row_group_size=len(waiting))
                groups.append((len(waiting), count))
                waiting, count = [], 0
    os.replace(temporary, path)
    return groups
