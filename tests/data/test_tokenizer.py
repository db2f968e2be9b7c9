"""A tokenizer file applied as transformers applies it, to the whole text."""

from __future__ import annotations

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rayzero3.data.tokenizer import encode, read_tokenizer
from rayzero3.errors import DataError

BEGIN, END = "<s>", "</s>"
TEXT = "the quick brown fox jumps over the lazy dog " * 8
TEMPLATES = {
    "Llama's": processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]),
    "an end too": processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, 0), (END, 1)]),
    "several": processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(single=f"{BEGIN} {BEGIN} $A", special_tokens=[(BEGIN, 0)])]
    ),
    "GPT-NeoX's": processors.ByteLevel(trim_offsets=False),
    "none": None,
}


def make_tokenizer(path, template):
    """Write a byte-level BPE with a template, saved as by a user who had last tokenized a batch: truncation and padding on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=[BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    if template is not None:
        tokenizer.post_processor = template
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_text_begins_as_the_tokenizer_says_and_is_whole(template, tmp_path):
    path = tmp_path / "tokenizer.json"
    make_tokenizer(path, TEMPLATES[template])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in (TEXT, "a", f"{END}b", f"b{END}"):
        expected = theirs(text, truncation=False, padding=False)["input_ids"]
        assert encode(read_tokenizer(path), text) == (expected[:-1] if template == "an end too" else expected)
    assert encode(read_tokenizer(path), "") == []


def test_a_text_of_another_alphabet_begins_so_too(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({BEGIN: 0, END: 1, "ACGT": 2}))
    tokenizer.pre_tokenizer, tokenizer.post_processor = pre_tokenizers.Whitespace(), TEMPLATES["an end too"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = read_tokenizer(tmp_path / "tokenizer.json")
    assert encode(read, "ACGT ACGT") == [0, 2, 2]


def test_a_file_that_is_no_tokenizer_is_told(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "tokenizer.json", tmp_path / "absent"):
        with pytest.raises(DataError, match="not readable.*Give the tokenizer.json that belongs to the model"):
            read_tokenizer(path)
