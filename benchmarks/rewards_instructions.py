"""What the published tests of IFEval's and IFBench's checkers say of short responses: (response, label, their score)."""

from __future__ import annotations

from typing import Any

from benchmarks.rewards_cases import Case


def _case(instruction: str, response: str, theirs: int, **kwargs: Any) -> Case:
    return Case(response, None, theirs, {"instruction_id_list": [instruction], "kwargs": [kwargs]})


_LESS, _LEAST = {"relation": "less than"}, {"relation": "at least"}
_BULLETS = "Only * that starts a list will be counted:\n    * This is a bullet point.\n    * Another.\n    . dot is not"
_MARKED = (
    "It is allowed to be *two different* highlighted *sections in the same*\nline. **This too** for **double ones.**\n"
)
_PARTS = "\n  paragraph 1\n  ***\n  paragraph 2\n  ***\n  paragraph 3"
_EMPTY_PART = "\n  paragraph 1\n          ***\n      paragraph 2\n          ***\n          ***"
_FIRST = {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"}
_RIVER = "Paris is a city of romance. The romantic river Seine winds past the Louvre, where the Mona Lisa resides."
_KEYS = {"keywords": ["romantic", "river", "Mona Lisa"]}
_SENTENCES = "length_constraints:number_sentences"
_WORDS = "length_constraints:number_words"
_L4RGE = "L4RGE L4NGU4GE M0DEL: AI syst3m th4t und3rstands, g3n3r4tes, or tr4nsforms\nl4ngu4g3 b4s3d on pr3vious l3arning & d4t4."
_FIVE, _BULLET = "This sentence has 5 words.", "* A bullet."
IFEVAL = [
    _case("language:response_language", "The response is English", 1, language="en"),
    _case("language:response_language", "Desayunamos en McDonald's hoy", 1, language="es"),
    _case("language:response_language", "Today we visit the Louvre", 1, language="en"),
    _case(_SENTENCES, "xx,x. xx,x! xx/x. x{x}x?", 0, num_sentences=4, **_LESS),
    _case(_SENTENCES, "xxxx. xx,x! xxxx. x(x)x?", 1, num_sentences=5, **_LESS),
    _case(_SENTENCES, "xxxx. xx,x! xx|x. x&x x?", 1, num_sentences=4, **_LEAST),
    _case(_SENTENCES, "xx-x. xx,x! xx}x. x,xx?", 0, num_sentences=5, **_LEAST),
    _case(
        "detectable_content:number_placeholders",
        "My [adjective] [noun] is [adjective] [noun]. I [verb] and [verb].",
        0,
        num_placeholders=7,
    ),
    _case("detectable_format:number_bullet_lists", _BULLETS, 1, num_bullets=2),
    _case("detectable_format:constrained_response", "My answer is no.   ", 1),
    _case("detectable_format:number_highlighted_sections", _MARKED, 1, num_highlights=4),
    _case("length_constraints:number_paragraphs", _PARTS, 1, num_paragraphs=3),
    _case("length_constraints:number_paragraphs", _EMPTY_PART, 0, num_paragraphs=2),
    _case("detectable_content:postscript", "That was it.\n\nP.S. I hope it is right.", 1, postscript_marker="P.S."),
    _case("detectable_content:postscript", "That was it.\n\nP.S. I hope it is right.", 0, postscript_marker="PS:"),
    _case("detectable_content:postscript", "\n P. S. There are even spaces\n", 1, postscript_marker="P.S."),
    _case("keywords:existence", _RIVER, 1, **_KEYS),
    _case("keywords:existence", "The romantic river of Paris.", 0, **_KEYS),
    _case("keywords:frequency", "\n  keyword, Keyword, KEYWORD\n  ", 1, keyword="  keyword ", frequency=4, **_LESS),
    _case("keywords:frequency", "\n  keyword, Keyword, KEYWORD\n  ", 1, keyword="  keyword ", frequency=3, **_LEAST),
    _case("keywords:frequency", "\n *keyword\n *Keyword\n *KEYWORD\n", 0, keyword="KEYWORD", frequency=4, **_LEAST),
    _case(_WORDS, "\n  d3sCRi7 lArge lAnguagE M0del w1tH 20 w0RdS.", 1, num_words=8, **_LESS),
    _case(_WORDS, _L4RGE, 0, num_words=16, **_LESS),
    _case(_WORDS, _L4RGE, 1, num_words=16, **_LEAST),
    _case(
        "length_constraints:nth_paragraph_first_word", "paragraph 1\n\n  I paragraph 2\n\n  paragraph 3", 1, **_FIRST
    ),
    _case("length_constraints:nth_paragraph_first_word", "paragraph 1\n\n  I paragraph 2", 0, **_FIRST),
]
IFBENCH = [
    _case("count:word_count_range", "\n    This message has five words.", 1, min_words=5, max_words=5),
    _case("count:unique_word_count", "\n    This message has five unique words.", 1, N=5),
    _case("ratio:stop_words", "\n    This message has a high stop word ratio.", 1, percentage=50),
    _case("ratio:sentence_type", "\n    This is a declarative sentence. Is this a question? I am not sure.", 1),
    _case("ratio:sentence_balance", "\n    This is a declarative sentence. Is this a question? I am not sure!", 1),
    _case("count:person_names", "Abigail, Gabriel, Nora", 1, N=3),
    _case("ratio:overlap", "This is the test.", 1, reference_text="This is the test.", percentage=100),
    _case("count:numbers", "This is 1 number. This is not 10 numbers. It is 3.", 1, N=3),
    _case("count:numbers", "Decimals like 3.14 should only count as one number 2.", 0, N=3),
    _case("count:numbers", "This is one number: 100,000", 1, N=1),
    _case("words:alphabet", "Be cause dandelions eat freedom.", 1),
    _case("words:alphabet", "Zooming around back.", 1),
    _case("words:alphabet", "Great finds enter dark caves.", 0),
    _case("words:vowel", "the eel eek eked.\nyeah.", 0),
    _case("words:vowel", "the eel eek eked out.", 1),
    _case("words:consonants", "This employs consonant clusters.", 1),
    _case("words:consonants", "This does not.", 0),
    _case("words:palindrome", "This is not a palindrome.", 0),
    _case("count:punctuation", "Some punctuation.,?!", 0),
    _case("count:punctuation", "All the punctuation marks: . , ! ? ; : !?", 1),
    _case("format:parentheses", "This (is [nested {very (deeply [here], yay!)}]).", 1),
    _case("format:parentheses", "((()))", 0),
    _case("format:quotes", 'These "quotes \'are "nested," here\' a lot."', 1),
    _case("format:quotes", 'Lots of "quotes" but not \'enough\' "nesting".', 0),
    _case("words:prime_lengths", "Prime numbers are in.", 1),
    _case("words:prime_lengths", "Composite numbers are not.", 0),
    _case("format:options", "A", 0, options="(A), (B), (C)"),
    _case("format:options", "I don't know", 1, options="I know or I don't know"),
    _case("format:options", "yes/no", 0, options="yes/no/maybe"),
    _case("format:newline", "This\n is\non\na\nnew\nline.", 1),
    _case("format:newline", "This\nis\nnot\nobeying\nthe\nrules, unfortunately.", 0),
    _case("format:emoji", "This ends with emoji 😀.", 1),
    _case("format:emoji", "😀 This starts with emoji.", 0),
    _case("ratio:sentence_words", "This is one. Now it's 22. On to three.", 1),
    _case("ratio:sentence_words", "This. Is. Not. Correct.", 0),
    _case("words:start_verb", "Does this sentence start with a verb?", 1),
    _case("words:start_verb", "This sentence does not start with a verb.", 0),
    _case("words:repeats", "This is one. This is two. This is three.", 0, small_n=2),
    _case("words:repeats", "This is one. This is two. This is three.", 1, small_n=3),
    _case("sentence:keyword", "I am it. It is me. I am not it. It is not me. I am not it.", 1, word="it", N=5),
    _case("sentence:keyword", "I am not it. It is not me.", 0, word="it", N=5),
    _case("count:pronouns", "I am a pronoun. It is a pronoun. He, she, and they are pronouns.", 1, N=5),
    _case("count:pronouns", "She is his sister. They share their parents.", 0, N=5),
    _case("count:pronouns", "My pronouns are she/her/hers.", 1, N=4),
    _case("count:pronouns", "She is his sister. They share their parents.", 1, N=4),
    _case("words:odd_even_syllables", "Children have little to regret. They enjoy the sunshine.", 1),
    _case("words:odd_even_syllables", "Children have little to regret. They enjoy the sunshine. But not the rain.", 0),
    _case("words:last_first", "This feels unnatural. Unnatural is this test.", 1),
    _case("words:last_first", "This is not a success. This is a failure.", 0),
    _case(
        "words:paragraph_last_first", "This paragraph started with this.\n\nAnother paragraph starts with another.", 1
    ),
    _case("words:paragraph_last_first", "This paragraph started with this. Another paragraph starts with another.", 0),
    _case("sentence:increment", f"This has three. {_FIVE} This sentence will have two more words.", 1, small_n=2),
    _case("sentence:increment", f"This has three. {_FIVE} This sentence will have two more words.", 0, small_n=3),
    _case("words:no_consecutive", "This shouldn't succeed.", 0),
    _case("words:no_consecutive", "This words, though. ", 1),
    _case("format:line_indent", "  Two spaces. \n   Three spaces.\n    Four spaces. ", 1),
    _case("format:line_indent", "  Two spaces. \n   Three spaces.\n     Five spaces. \n    Four spaces.", 0),
    _case("format:quote_unquote", ' "Just a quoted phrase with no explanation." ', 0),
    _case("format:list", "Some explanation.\n ... A bullet point.\n ... Another bullet point.", 1, sep="..."),
    _case("format:list", "- Some explanation.\n - A bullet point.\n - Another bullet point", 0, sep="..."),
    _case("format:thesis", "<i>\n  A thesis.\n</i>\nA paragraph", 1),
    _case("format:sub-bullets", f"Some sentence.\n  {_BULLET}\n     - A sub-bullet.\n     - Another sub-bullet.", 1),
    _case(
        "format:sub-bullets", f"Some sentence.\n  {_BULLET}\n  * Another bullet.\n    - Only one has a sub bullet.", 0
    ),
    _case("format:no_bullets_bullets", f"This is a sentence. This is another sentence.\n  {_BULLET}\n  {_BULLET}", 1),
    _case("format:no_bullets_bullets", f"This is a sentence.\n  {_BULLET}\n  {_BULLET}", 0),
    _case("format:no_bullets_bullets", f"This is a sentence. This is another sentence.\n  {_BULLET}\n", 0),
    _case("custom:multiples", "Sure! Here it is: 14,21,28,35,42,49", 1),
    _case("custom:multiples", "7 14 21 28 35 42 49", 0),
    _case("custom:character_reverse", ".su eht fo lobmys lanoitan eht si elgae dlab", 1),
    _case("custom:character_reverse", "The bald eagle is the national bird of the US.", 0),
    _case("custom:word_reverse", ".US the of bird national the is eagle bald The.", 1),
    _case("custom:word_reverse", "The bald eagle is the national bird of the US.", 0),
    _case("custom:date_format_list", "1796-07-05, 1800-12-31", 1),
    _case("custom:date_format_list", "07-05-1796", 0),
]
