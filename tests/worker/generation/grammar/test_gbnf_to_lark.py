"""Grammars in GBNF: the texts that they allow, and the reasons why they are refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from string import ascii_lowercase
from types import ModuleType

import pytest
from tests.support.gbnf_oracle import TextsOf, random_gbnf
from tests.support.grammars import allows, constraint_of, token_of

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar import lexeme_automaton, lexeme_conflicts
from llamaq.worker.generation.grammar.endless_rules import without_endless_rules
from llamaq.worker.generation.grammar.gbnf_reader import MAX_NESTING, read_gbnf
from llamaq.worker.generation.grammar.gbnf_to_lark import NO_FORCING, gbnf_to_lark, is_exact
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint

MAX_COMPARISON_S = 8.0
"""Upper bound on the processor time of a translation, on a slow and busy machine. A trial has 10 s."""
TOO_COMPLEX = "the grammar is too complex"
NESTED = "(" * (MAX_NESTING + 1) + '"a"' + ")" * (MAX_NESTING + 1)
BAD_GRAMMARS = {
    "empty": (" ", "no rules"),
    "comment": ("# nothing", "no rules"),
    "no root": ('a ::= "x"', "no rule 'root'"),
    "undefined rule": ('root ::= "x" nothing', "'nothing', which is not defined"),
    "second rule": ('root ::= "x"\nroot ::= "y"', "a second rule 'root' at line 2, column 1"),
    "syntax": ('root ::= "a"\n  b := "c"', "a syntax error at line 2, column 5"),
    "unterminated": ('root ::= "abc', "a syntax error at line 1, column 10"),
    "open group": ('root ::= ("a"', "not closed"),
    "closed group": ('root ::= "a")', "not opened"),
    "repetition of nothing": ("root ::= *", "a repetition of nothing"),
    "range": ("root ::= [z-a]", "descending order"),
    "bad escape": (r'root ::= "\q"', "unknown escape sequence at line 1, column 10"),
    "nested": (f"root ::= {NESTED}", "nest deeper"),
    "nested 20,000 deep": ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nest deeper"),
    "repetitions of repetitions": ('root ::= "a"' + "*" * 5000, "repetitions nest too deep"),
    "no character": ("root ::= [^\\x00-\\U0010FFFF]", "no character matches"),
    "not Unicode": ('root ::= "\\U00FFFFFF"', "not a character of Unicode"),
    "unknown token": ('root ::= "a" <nothing>', "<nothing>, which is not one token of this model's vocabulary"),
    "token without an id": ('root ::= "a" !<[EOS]>', "<[EOS]>, which is not one token of this model's vocabulary"),
    "no token": ('root ::= root "x"', "cannot be used"),
    "no finite text": ('root ::= "x" a\na ::= ("y" | "z" root) a', "no text of its rule 'root' has an end"),
}


@pytest.mark.parametrize(("grammar", "reason"), BAD_GRAMMARS.values(), ids=BAD_GRAMMARS)
def test_a_bad_grammar_is_refused_with_a_reason(sandbox: GrammarSandbox, grammar: str, reason: str) -> None:
    with pytest.raises(JobRejected) as refused:
        sandbox.check(JobParams(grammar=grammar))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert reason in refused.value.message


GOOD_GRAMMARS = {
    "empty output": 'root ::= ""',
    "right recursion": 'root ::= "a" root | "b"',
    "nested repetition": 'root ::= (("a"*)* "x"?)* "b"',
    "many repetitions": 'root ::= ("x"{40}){40}',
    "brackets in literals": 'root ::= "<a>((((" [(<] # (((\n',
    "unicode": 'root ::= [äöü]+ "€" "\\u00e9"',
    "escapes": 'root ::= "\\"\\\\" [\\]\\[a-z] ("b")?',
    "other rules first": 'a ::= "x"\nroot ::= a |\n  "y"',
    "left recursion": 'root ::= root "x" | "y"',
    "hidden left recursion": 'root ::= [a-z]{900} c\nc ::= a c "x" | "y"\na ::= b\nb ::= "z"?',
    "indirect left recursion": 'root ::= a\na ::= (b | "x") "y"\nb ::= "z"* root',
    "keywords of Lark": 'root ::= start ignore\nstart ::= "x" root?\nignore ::= "y"',
    "similar names": 'root ::= fooBar foo-bar\nfooBar ::= "x"\nfoo-bar ::= "y"',
    "token": "root ::= <[5]> !<[6]>",
    "any character": 'root ::= . [^"] [^\\x00-\\x1f]',
    "thousands of rules": "\n".join(f"{'root' if not n else f'r{n}'} ::= r{n + 1}" for n in range(4000))
    + '\nr4000 ::= "x"',
    "thousands of rules in a recursive one": 'root ::= r0 root | "y"\n'
    + "\n".join(f"r{n} ::= r{n + 1}" for n in range(3000))
    + '\nr3000 ::= "x"',
    "two parses of each text": 'root ::= [a-z ] root "b" | [a-z ] root "c" | "d"',
}


@pytest.mark.parametrize("grammar", GOOD_GRAMMARS.values(), ids=GOOD_GRAMMARS)
def test_a_good_grammar_compiles(sandbox: GrammarSandbox, vocab: Vocab, grammar: str) -> None:
    compiled = sandbox.check(JobParams(grammar=grammar)).text
    assert ConstraintTokenizer(vocab).compile(compiled).allowed_tokens()


def accepts(vocab: Vocab, gbnf: str, text: str) -> bool:
    """Return whether a grammar accepts a whole text, given as tokens of one byte or character each."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    return accepts_tokens(constraint_of(vocab, gbnf), [pieces[bytes([byte])] for byte in text.encode()], vocab.eos)


def accepts_tokens(constraint: TokenConstraint, tokens: list[int], end_token: int | None) -> bool:
    try:
        constraint.accept(tokens)
        return allows(constraint, end_token)
    except JobRejected as exc:
        if TOO_COMPLEX in exc.message:
            raise
        return False


@contextmanager
def too_complex_or_empty() -> Iterator[None]:
    """Ignore two errors: the grammar has no text, or a text has too many parses for llguidance."""
    try:
        yield
    except JobRejected as exc:
        if TOO_COMPLEX not in exc.message and "is allowed first" not in exc.message:
            raise


@pytest.mark.parametrize("end", ["a", "(a)", '(a "y"){2}', 'a | "b" | a "c"', 'a* "b"'])
def test_a_rule_whose_texts_have_no_end_is_never_begun(vocab: Vocab, end: str) -> None:
    """Llguidance does not return from the mask after such a text, because it forces one x after the other."""
    gbnf = f'root ::= "xb" | t ({end})\na ::= a u\nt ::= "x"*\nu ::= "y"*'
    assert "a" not in without_endless_rules(read_gbnf(gbnf)), "the next lines would not return"
    text = "xxxb" if '"b"' in end else "xb"
    assert accepts(vocab, gbnf, text)
    assert not accepts(vocab, gbnf, "xx")


JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        ('root ::= [a-z]+ "z"', ["az", "zz", "azz"], ["z", "ab", ""]),
        ('root ::= word " " root | word\nword ::= [a-z]+ "z"', ["az bz", "zz"], ["az b", "az "]),
        ("root ::= [^a-c\\]]{2,3}", ["de", "xyz"], ["d", "da", "d]", "wxyz"]),
        ('root ::= "a"* "b"? ("c" | "d"){2}', ["cd", "aabcc"], ["abc", "bbcd"]),
        ('root ::= "a" "b"{0} ("c" | "d"){0,0} "e"', ["ae"], ["abe", "ace"]),
        ('root ::= [a\\-z]+ "\\-"', ["a-z-"], ["b-", "a"]),
        ('root ::= ("a"{2}){2}', ["aaaa"], ["aa", "aaaaaa"]),
        ('root ::= ["\\\\/.*-]+', ['"\\/.*-'], ["a"]),
        ('root ::= "\\x41\\u0042" [\\U00000043-D]', ["ABC", "ABD"], ["ABE", "ab"]),
        ('root ::= "a\\nb\\t\\"/"', ['a\nb\t"/'], ["a b"]),
        (
            JSON,
            ['{"a": [1, -2.5e3, "\\u00e9", {}], "b":true}', "{}"],
            ['{"a": [1,]}', "[1]", '{"a": "\n"}', '{"a": 01'],
        ),
        (ARITHMETIC, ["1=2\n", "a1 +( 2 *b) =\n c\n", "1=1\n2=2\n"], ["1=2", "=2\n", "1 2=3\n", "(1=1\n"]),
        ('root ::= digits "1" root | "x"\ndigits ::= [0-9]+', ["01x", "11211x", "x"], ["1x", "012x"]),
        ('root ::= "ab" root "c" | "a" root "b" | ""', ["", "ab", "aabb", "abc", "aabcb"], ["a", "abb"]),
        ('root ::= "if" root | word\nword ::= "i" "f"? "x" | root', ["ifix", "ififx", "ifx"], ["if", "x"]),
        (
            'root ::= "[" ws (item (",\\n" ws item)*)? "]"\nitem ::= word | root\nword ::= [a-z]+ ws\nws ::= [ \\n]*',
            ["[a,\n b]", "[ [c ],\n[]]", "[]"],
            ["[a,b]", "[,\n]"],
        ),
        ('root ::= [a-z] "12" root | "x" [0-9]+ ";" | "!"', ["x12;", "x12!", "a12x1;"], ["a1;", "x12"]),
    ],
)
def test_a_grammar_accepts_the_texts_that_gbnf_defines(
    vocab: Vocab, gbnf: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(vocab, gbnf, text)] == []
    assert [text for text in bad if accepts(vocab, gbnf, text)] == []


def test_random_grammars_accept_the_texts_that_gbnf_defines(vocab: Vocab) -> None:
    tokens = {character: token_of(vocab, character) for character in "abc"}
    texts = ["".join(text) for length in range(5) for text in product("abc", repeat=length)]
    n_compared = 0
    for seed in range(25):
        gbnf = random_gbnf(Random(seed))
        defined = TextsOf(gbnf)
        with too_complex_or_empty():
            constraint = constraint_of(vocab, gbnf)
            for text in texts:
                is_accepted = accepts_tokens(constraint.copy(), [tokens[one] for one in text], vocab.eos)
                assert is_accepted == (text in defined), (gbnf, text)
                n_compared += 1
    assert n_compared > 18 * len(texts)


def random_words(random: Random, number: int, letters: str = ascii_lowercase, n_letters: int = 6) -> list[str]:
    words: set[str] = set()
    while len(words) < number:
        words.add("".join(random.choices(letters, k=random.randint(1, n_letters))))
    return sorted(words, key=lambda _: random.random())


def either(words: Iterable[str]) -> str:
    return " | ".join(f'"{word}"' for word in words)


@pytest.mark.parametrize("seed", range(12))
def test_lists_of_words_that_begin_alike_accept_the_texts_that_gbnf_defines(vocab: Vocab, seed: int) -> None:
    random = Random(seed)
    rules = [either(random_words(random, random.randint(2, 6), "ab", 3)) for _ in range(2)]
    gbnf = f'root ::= w root "c" | w | v "a" root?\nw ::= {rules[0]}\nv ::= ({rules[1]}) ("" | "c")'
    assert is_exact(gbnf_to_lark(gbnf, "root"))
    defined, constraint = TextsOf(gbnf), constraint_of(vocab, gbnf)
    tokens = {character: token_of(vocab, character) for character in "abc"}
    for text in ("".join(text) for length in range(6) for text in product("abc", repeat=length)):
        is_accepted = accepts_tokens(constraint.copy(), [tokens[one] for one in text], vocab.eos)
        assert is_accepted == (text in defined), (gbnf, text)


@pytest.mark.parametrize("n_others", [10, 300])
def test_a_name_that_is_the_beginning_of_another_one_may_be_followed_by_any_name(vocab: Vocab, n_others: int) -> None:
    others = [word.capitalize() for word in random_words(Random(0), n_others)]
    gbnf = f'root ::= name (" " name)* | "(" root ")"\nname ::= {either(["New York", "New York City", *others])}'
    assert is_exact(gbnf_to_lark(gbnf, "root"))
    defined, constraint = TextsOf(gbnf), constraint_of(vocab, gbnf)
    beginnings = ("New York", "New York City", "New York New York", others[0], "New", "(New York")
    ends = ("", " ", " City", " New York", f" {others[1]}", f" {others[1]})", f" {others[1]} New York City)", "x")
    texts = [beginning + end for beginning, end in product(beginnings, ends)]
    tokens = {character: token_of(vocab, character) for character in set("".join(texts))}
    accepted = [text for text in texts if accepts_tokens(constraint.copy(), [tokens[one] for one in text], vocab.eos)]
    assert f"New York {others[1]}" in accepted
    assert accepted == [text for text in texts if text in defined]


def terminals(words: list[str]) -> str:
    """Return a recursive grammar with a terminal for each word. All terminals may begin with the same text."""
    rules = [f't{number} ::= [a-z]{{3}} "{word}" [0-9]*' for number, word in enumerate(words)]
    return "\n".join([f'root ::= "(" root ")" | {" | ".join(f"t{n}" for n in range(len(words)))}', *rules])


def lines_of(characters: str) -> str:
    """Return a grammar of lines, each with a name and a value of these characters, and one of 500 numbers."""
    line = " | ".join(f'c+ ": " c+ "{number}"' for number in range(500))
    return f'root ::= (line "\\n" root)? "."\nline ::= {line}\nc ::= [{characters}]'


WORDS = random_words(Random(1), 4000)
CALLS = " | ".join(f'"{word}" "(" root ")"' for word in WORDS[:1000])
MANY_LITERALS = {
    "words": f'root ::= word ("," word)* | "(" root ")"\nword ::= {either(WORDS)}',
    "words of which one begins another": f'root ::= word ("," word)* | "(" root ")"\nword ::= {either(WORDS[:1500])}'
    ' | "one" | "one,two"',
    "separate literals": f'root ::= {CALLS} | "x"',
    "separate literals and a conflict": f'root ::= {CALLS} | "x" | "if" t "f" "(" root ")"\nt ::= "f"+',
    "words before white space": 'root ::= "(" root ")" | word "\\n"\nword ::= '
    + " | ".join(f'"{word}" ws' for word in WORDS[:1000])
    + "\nws ::= [ \\n]*",
    "terminals that begin alike": terminals(WORDS[:200]),
    "ranges that overlap": lines_of("".join(f"一-{chr(0x4E01 + number)}" for number in range(800))),
    "alternatives with the same loop": 'root ::= (line "\\n" root)? "."\nline ::= '
    + " | ".join(f'[a-z]+ ": " [a-z0-9 ]+ "{number}"' for number in range(300)),
}


@pytest.mark.parametrize("gbnf", MANY_LITERALS.values(), ids=MANY_LITERALS)
def test_a_recursive_grammar_with_many_literals_is_exact(gbnf: str) -> None:
    started_s = time.process_time()
    assert is_exact(gbnf_to_lark(gbnf, "root"))
    assert time.process_time() - started_s < MAX_COMPARISON_S


LONG_COMPARISONS = {
    "terminals": terminals(WORDS[:600]),
    "copies": 'root ::= "(" root ")" | t\nt ::= (((([a-z0-9] "x"?){8}){8}){8}){8}',
    "separate ranges": lines_of("".join(chr(0x4E00 + 2 * number) for number in range(800))),
    "optional characters": f'root ::= "(" root ")" | t\nt ::= {"[ab]?" * 2000}',
    "empty copies": 'root ::= "(" root ")" | a0\n'
    + "\n".join(f"a{number} ::= a{number + 1} a{number + 1}" for number in range(40))
    + '\na40 ::= ""',
}


@pytest.mark.parametrize("gbnf", LONG_COMPARISONS.values(), ids=LONG_COMPARISONS)
def test_the_comparison_of_lexemes_ends_in_a_bounded_time(gbnf: str) -> None:
    started_s = time.process_time()
    assert not is_exact(gbnf_to_lark(gbnf, "root"))
    assert time.process_time() - started_s < MAX_COMPARISON_S


def test_a_rule_that_is_too_large_to_compare_leaves_the_conflicts_of_others_resolved(
    monkeypatch: pytest.MonkeyPatch, vocab: Vocab
) -> None:
    monkeypatch.setattr(lexeme_conflicts, "MAX_COMPARISON_STEPS", 1000)
    gbnf = 'root ::= "(" root ")" | num "\\n" | "[" t "]"\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n'
    gbnf += LONG_COMPARISONS["copies"].splitlines()[1]
    assert not is_exact(gbnf_to_lark(gbnf, "root"))
    assert accepts(vocab, gbnf, "(1 \n)")


def n_divided(gbnf: str) -> int:
    """Return the number of rules and groups that are not matched as terminals."""
    return len(re.findall(r"^r\d+:", gbnf_to_lark(gbnf, "root"), re.MULTILINE))


def test_the_rules_of_json_are_matched_as_terminals() -> None:
    """Rules that are matched character by character take several times as long."""
    assert n_divided(JSON) == 4 + 8, "not strings, numbers and white space"


def test_a_word_is_a_terminal_also_if_the_white_space_after_it_is_divided() -> None:
    gbnf = 'root ::= "(" root ")" | word "\\n"\nword ::= [a-z]+ ws\nws ::= [ \\n]*'
    assert "r1: T2 r3" in gbnf_to_lark(gbnf, "root").splitlines()


def test_an_identifier_is_a_terminal_also_if_it_can_begin_with_a_keyword() -> None:
    gbnf = 'root ::= "{" root "}" | type name | name " =" root\ntype ::= ("int" | "char") " "\nname ::= [a-z]+'
    assert n_divided(gbnf) == 2, "not only the root, and the keyword from its space"


def test_a_grammar_that_is_too_large_to_compare_its_lexemes_keeps_its_terminals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert n_divided(ARITHMETIC) == 6 + 5
    monkeypatch.setattr(lexeme_conflicts, "MAX_STEPS", 100)
    assert n_divided(ARITHMETIC) == 3 + 4


@pytest.mark.parametrize(
    ("module", "limit"), [(lexeme_conflicts, "MAX_STEPS"), (lexeme_automaton, "MAX_STATES")], ids=["steps", "states"]
)
def test_no_text_is_forced_without_end_if_lexemes_were_not_compared(
    monkeypatch: pytest.MonkeyPatch, vocab: Vocab, module: ModuleType, limit: str
) -> None:
    gbnf = 'root ::= "b" t "a" root | "c"\nt ::= "a"+'
    assert accepts(vocab, gbnf, "baaac")
    monkeypatch.setattr(module, limit, 0)
    assert gbnf_to_lark(gbnf, "root").startswith(NO_FORCING), "the next lines would not return"
    constraint = constraint_of(vocab, gbnf)
    constraint.accept([token_of(vocab, text) for text in "baa"])
    assert allows(constraint, token_of(vocab, "a"))


def test_a_negated_token_is_no_end_token(sandbox: GrammarSandbox, vocab: Vocab) -> None:
    compiled = sandbox.check(JobParams(grammar='root ::= "a" !<[5]> "b"')).text
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    constraint.accept([next(token for token in range(vocab.n_tokens) if vocab.piece(token) == b"a")])
    excluded = {5, *vocab.end_tokens}
    assert [token for token in range(vocab.n_tokens) if token not in constraint.allowed_tokens()] == sorted(excluded)


def test_a_grammar_may_have_another_root_and_a_schema_may_not(sandbox: GrammarSandbox) -> None:
    assert sandbox.check(JobParams(grammar='start ::= "x"', grammar_root="start")).text
    with pytest.raises(JobRejected, match="grammar_root"):
        sandbox.check(JobParams(json_schema={}, grammar_root="start"))


@pytest.fixture(scope="module")
def tag_sandbox(tag_vocab: Vocab) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(tag_vocab, timeout_s=3)
    yield sandbox
    sandbox.close()


def test_a_token_may_be_named_by_its_text(tag_sandbox: GrammarSandbox, tag_vocab: Vocab) -> None:
    tags = tag_vocab.tag_tokens
    compiled = tag_sandbox.check(JobParams(grammar='root ::= <think> !</think> </think> "a"')).text
    constraint = ConstraintTokenizer(tag_vocab).compile(compiled)
    assert constraint.allowed_tokens().ids().tolist() == [tags["<think>"]]
    constraint.accept([tags["<think>"]])
    assert tags["</think>"] not in constraint.allowed_tokens()
    constraint.accept([tags["<think>"], tags["<tool_call>"]])
    assert constraint.allowed_tokens().ids().tolist() == [tags["</think>"]]
