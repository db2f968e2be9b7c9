"""Generation says what transformers says, padded or not, on one rank or several that wait for each other."""

from __future__ import annotations

import pytest
import torch

from rayzero3.config import parse_job
from rayzero3.models.context import Cache, Context
from rayzero3.models.generate import Sampling, generate
from rayzero3.train.trainee import build
from tests.models import folders
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200], [17], [31, 7, 7, 90, 3, 250, 11], [44, 2]]
KINDS = {
    "neox": ("GPTNeoX", {}),
    "llama, grouped": ("Llama", {"num_key_value_heads": 2}),
    "mistral, window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}


def job_for(folder, key="init_from"):
    return parse_job({"name": "x", "model": {key: str(folder)}, "data": {"path": str(folder)}, "storage": str(folder)})


def continued(rank, world_size, job, prompts, sampling):
    """Every rank its share; the texts in the order of the prompts, None where another rank has them. And how many forwards there were."""
    trainee, forwards = build(job, 0, rank, world_size, CPU), 0
    comm = trainee.model.comm

    def forward(ids, context):
        nonlocal forwards
        forwards += 1
        return trainee(ids, context)

    def all_done(done):
        return not comm.sum_rows(torch.tensor([not done], dtype=torch.int64), "test").item()

    own = prompts[rank::world_size]
    generators = [torch.Generator().manual_seed(index) for index in range(len(prompts))][rank::world_size]
    texts = generate(forward, own, sampling, generators, CPU, all_done)
    found = [None] * len(prompts)
    found[rank::world_size] = texts
    return found, forwards


def merged(results, count):
    return [next(found[index] for found, _ in results if found[index] is not None) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_continuations_are_those_of_the_reference_prompt_by_prompt(kind, tmp_path):
    theirs = folders.make_folder(tmp_path, KINDS[kind][0], **KINDS[kind][1])
    sampling = Sampling(12, ends=frozenset([0]))
    expected = []
    for prompt in PROMPTS:
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=299)[0, len(prompt) :].tolist()
        expected.append(ids[: ids.index(0)] if 0 in ids else ids)
    for world_size in (1, 2):
        results = run_ranks(continued, world_size, job_for(tmp_path), PROMPTS, sampling)
        assert merged(results, len(PROMPTS)) == expected


def test_another_librarys_model_continues_with_its_own_cache(tmp_path):
    folders.make_folder(tmp_path, "Llama")
    ours, theirs = (run_ranks(continued, 2, job_for(tmp_path, key), PROMPTS, Sampling(8)) for key in ("init_from", "transformers"))
    assert merged(ours, 4) == merged(theirs, 4)


def test_ranks_go_on_until_all_are_done_and_no_further(tmp_path):
    """Three ranks, two prompts: the third rank has none. The end of each text is found by looking at what follows it without an end."""
    folders.make_folder(tmp_path, "Llama")
    free = merged(run_ranks(continued, 1, job_for(tmp_path), PROMPTS[:2], Sampling(20)), 2)
    end = next(token for token in free[0][1:] if token != free[0][0])
    stops = [text.index(end) if end in text else len(text) for text in free]
    results = run_ranks(continued, 3, job_for(tmp_path), PROMPTS[:2], Sampling(20, ends=frozenset([end])))
    assert merged(results, 2) == [text[:stop] for text, stop in zip(free, stops, strict=True)]
    assert {forwards for _, forwards in results} == {min(max(stops) + 1, 20)}


def test_what_is_drawn_for_a_prompt_depends_on_no_other_prompt_and_no_rank(tmp_path):
    folders.make_folder(tmp_path, "Llama")
    sampling = Sampling(10, temperature=0.8, top_p=0.9)
    one = merged(run_ranks(continued, 1, job_for(tmp_path), PROMPTS, sampling), 4)
    assert merged(run_ranks(continued, 2, job_for(tmp_path), PROMPTS, sampling), 4) == one
    assert merged(run_ranks(continued, 1, job_for(tmp_path), PROMPTS[:1], sampling), 1) == one[:1]
    assert one != merged(run_ranks(continued, 1, job_for(tmp_path), PROMPTS, Sampling(10)), 4)


def drawn(logits, count=4000, **choices):
    sampling, generator = Sampling(1, **choices), torch.Generator().manual_seed(3)
    found = [generate(lambda ids, context: torch.tensor(logits).view(1, 1, -1), [[1]], sampling, [generator], CPU)[0][0] for _ in range(count)]
    return torch.bincount(torch.tensor(found), minlength=len(logits)).double() / count


def test_draws_have_the_probabilities_of_the_logits_within_the_likeliest_ones():
    logits = [1.0, 3.0, 2.0, 0.0, -1.0]
    for temperature in (1.0, 2.0):
        wanted = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
        assert (drawn(logits, temperature=temperature) - wanted).abs().max() < 0.03
    shares = drawn(logits, temperature=1.0, top_p=0.8)
    wanted = torch.tensor(logits, dtype=torch.float64).softmax(0)[[1, 2]]
    assert shares[[0, 3, 4]].sum() == 0 and abs(shares[1] - wanted[0] / wanted.sum()) < 0.03
    assert drawn(logits, 50, temperature=1.0, top_p=1e-6)[1] == 1.0


def test_a_cached_forward_has_the_logits_of_the_whole_text(tmp_path):
    folders.make_folder(tmp_path, "Mistral", sliding_window=4, num_key_value_heads=2)
    for found in run_ranks(step_by_step, 1, job_for(tmp_path)):
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def step_by_step(rank, world_size, job):
    trainee = build(job, 0, rank, world_size, CPU)
    ids = torch.randint(300, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = trainee(ids, Context())
        cache, found = Cache(torch.zeros(2, dtype=torch.int64), 15), []
        for start, stop in ((0, 6), (6, 7), (7, 11), (11, 15)):
            found.append(trainee(ids[:, start:stop], Context(cache=cache))[:, -1])
            cache.filled = stop
    return torch.stack(found), torch.stack([whole[:, stop - 1] for stop in (6, 7, 11, 15)])
