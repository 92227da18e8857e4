"""The shipped demo model: the grammar of its texts, and its stories, recall and chat in llama.cpp on held-out texts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaq.tools.demo_model import word_lists
from llamaq.tools.demo_model.corpus import Mixture, draw_document
from llamaq.tools.demo_model.dialogues import conversation
from llamaq.tools.demo_model.document import BOS, END, EOS, Role
from llamaq.tools.demo_model.evaluate import (
    gap,
    grammar_share,
    measure_chat,
    measure_noise,
    measure_recall,
    measure_stories,
    recall_gaps,
    story_gaps,
)
from llamaq.tools.demo_model.fact_questions import recall_document, recall_probe
from llamaq.tools.demo_model.llama_runner import LlamaRunner
from llamaq.tools.demo_model.seeded_choice import PREFERENCE, Split, generator, is_held_out, skewed
from llamaq.tools.demo_model.stories import draw_hero, story_document

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "worker" / "llamaq" / "worker" / "model"
MODEL = MODEL_FOLDER / "llamaq-demo.gguf"
EVEN = Mixture(recall=1, stories=1, dialogues=1)


@pytest.fixture(scope="module")
def runner() -> Iterator[LlamaRunner]:
    with LlamaRunner(MODEL) as runner:
        yield runner


def test_equal_seeds_give_equal_texts_and_different_seeds_different_ones() -> None:
    texts = [draw_document(Split.TRAIN, seed, EVEN, 256).text for seed in range(50)]
    assert texts == [draw_document(Split.TRAIN, seed, EVEN, 256).text for seed in range(50)]
    assert len(set(texts)) == 50


def test_no_training_text_states_a_held_out_fact() -> None:
    fact = re.compile(rf"\b({'|'.join(word_lists.NAMES)}|I) ha(?:s|ve) an? (\w+) (\w+)[.]")
    stated = Counter(
        is_held_out(*triple)
        for seed in range(400)
        for triple in fact.findall(draw_document(Split.TRAIN, seed, EVEN, 512).text)
    )
    assert stated[False] > 1000
    assert stated[True] == 0


def test_no_hero_is_in_both_splits() -> None:
    heroes = {split: {draw_hero(generator(split, "test", seed), split) for seed in range(600)} for split in Split}
    assert len(heroes[Split.TRAIN]) > 100
    assert len(heroes[Split.HELD_OUT]) > 20
    assert not heroes[Split.TRAIN] & heroes[Split.HELD_OUT]


def test_every_probe_asks_a_held_out_fact_that_its_prompt_states_once() -> None:
    for seed in range(50):
        probe = recall_probe(seed, 100)
        name, colour, thing = probe.answer.strip(" .").replace(" an ", " a ").split(" has a ")[0], *probe.value.split()
        assert is_held_out(name, colour, thing)
        assert probe.prompt.count(probe.answer.strip()) == 1
        assert probe.prompt.count(f" {name} has ") <= 1


def test_a_skewed_choice_prefers_one_option_of_its_context() -> None:
    rng = generator(Split.TRAIN, "test")
    (_, most), *others = Counter(skewed(rng, word_lists.PLACES, "place", "Mia") for _ in range(2000)).most_common()
    assert most / 2000 == pytest.approx(PREFERENCE + (1 - PREFERENCE) / len(word_lists.PLACES), abs=0.04)
    assert max(count for _, count in others) < most / 20


def test_facts_are_drawn_uniformly_so_that_only_the_context_has_the_answer() -> None:
    things = Counter(recall_probe(seed, 20).value for seed in range(300))
    assert things.most_common(1)[0][1] < 10


def test_documents_begin_and_end_with_their_special_tokens() -> None:
    for seed in range(30):
        text = draw_document(Split.TRAIN, seed, EVEN, 256).text
        assert text.startswith(BOS)
        assert text.endswith(EOS)
        assert text.count(BOS) == text.count(EOS) == 1


def test_the_answers_of_a_document_have_the_largest_weight_and_occur_in_its_facts() -> None:
    assert Role.ANSWER.value > Role.TEXT.value > Role.GIVEN.value
    for seed in range(20):
        _, facts, *rest = recall_document(Split.TRAIN, seed, 128).segments
        answers = [segment.text.strip(" .") for segment in rest if segment.role is Role.ANSWER]
        assert facts.role is Role.GIVEN
        assert answers
        # The remaining answers belong to reverse questions.
        assert sum(answer in facts.text for answer in answers) >= len(answers) / 2


def test_a_conversation_asks_for_facts_that_it_states() -> None:
    for seed in range(20):
        assert any(turn.recalled is not None for turn in conversation(Split.HELD_OUT, seed))


def test_the_patterns_of_the_grammar_match_its_stories_and_no_other_text() -> None:
    for seed in range(20):
        text = story_document(Split.HELD_OUT, seed).text.removeprefix(BOS).removesuffix(EOS)
        assert grammar_share(text) > 0.99
    assert grammar_share("am am am am tell you tell. The the cat of is.") < 0.2


def test_the_file_is_small_and_loads_fast_and_has_a_context_of_2048_tokens(runner: LlamaRunner) -> None:
    assert MODEL.stat().st_size <= 8_000_000
    assert runner.load_s < 5  # 0.02 s on an idle machine
    assert runner.training_context >= 2048
    assert 2000 <= runner.vocabulary_size <= 4000


def test_any_text_is_restored_after_tokenization(runner: LlamaRunner) -> None:
    text = "Größe, 你好 🙂\n\n  two  spaces\tand\x00 a tab; it's 12345 o'clock" + "".join(map(chr, range(1, 256)))
    assert runner.text(runner.tokenize(text, add_bos=False)) == text


def test_text_prompts_and_rendered_chats_begin_with_one_bos(runner: LlamaRunner) -> None:
    (bos,) = runner.tokenize(BOS, add_bos=False)
    for ids in (runner.tokenize("Once"), runner.render([{"role": "user", "content": "hi"}])):
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_both_end_tokens_end_a_generation(runner: LlamaRunner) -> None:
    for special in (END, EOS):
        (token,) = runner.tokenize(special, add_bos=False)
        assert runner.is_end(token)


@pytest.mark.parametrize("distance_tokens", [50, 100, 200])
def test_the_model_recalls_held_out_facts(runner: LlamaRunner, distance_tokens: int) -> None:
    assert measure_recall(runner, distance_tokens, 40).share >= 0.95


@pytest.mark.parametrize("frame", [0, 2])
def test_the_model_recalls_with_every_form_of_question(runner: LlamaRunner, frame: int) -> None:
    assert measure_recall(runner, 80, 20, frame).share >= 0.95


def test_the_model_continues_stories_to_their_end(runner: LlamaRunner) -> None:
    stories = measure_stories(runner, 4)
    assert all(story.ended for story in stories)
    assert all(story.tokens >= 60 for story in stories)
    assert sum(story.tokens for story in stories) / len(stories) >= 100
    assert sum(story.understood for story in stories) / len(stories) >= 0.95
    assert len({story.text for story in stories}) == len(stories)


def test_the_model_answers_from_earlier_turns(runner: LlamaRunner) -> None:
    chat = measure_chat(runner, 4)
    assert chat.turns >= 3
    assert chat.share >= 0.95
    assert chat.ended == chat.answers


def test_greedy_output_does_not_depend_on_the_shape_of_the_batch(runner: LlamaRunner) -> None:
    noise = measure_noise(runner)
    largest_change = max(measured.largest_gap_change for measured in noise.values())
    assert all(measured.changed_tokens == 0 for measured in noise.values())
    for gaps in (recall_gaps(runner, 100, 10), story_gaps(runner, 2)):
        assert sorted(gaps)[len(gaps) // 100] > largest_change


def test_every_prompt_of_the_demo_gets_an_answer_that_ends(runner: LlamaRunner) -> None:
    prompts = json.loads((MODEL_FOLDER / "demo_prompts.json").read_text())
    assert len(prompts) == 8
    for entry in prompts:
        chat = "messages" in entry
        ids = runner.render(entry["messages"]) if chat else runner.tokenize(entry["prompt"])
        answer, ended = runner.greedy(ids, entry["max_tokens"])
        assert answer
        assert ended
        assert entry["title"]


def test_the_gap_is_between_the_two_best_logits(runner: LlamaRunner) -> None:
    runner.clear()
    (row,) = runner.decode([(0, runner.tokenize("Once upon"))])
    best, second = sorted(row)[::-1][:2]
    assert gap(row) == pytest.approx(best - second)
