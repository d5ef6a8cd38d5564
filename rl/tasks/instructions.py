"""Instructions of IFEval, each with a rule that says whether an answer follows it.

Zhou et al., "Instruction-Following Evaluation for Large Language Models", 2023, and the program
that its authors published, whose verdicts these are.
"""

import json
import re
from collections.abc import Callable, Sequence

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def follows(text: str, instruction: str, options: dict) -> bool:
    """Whether ``text`` follows the instruction with these options. Raises an error for options that
    the instruction does not have.
    """
    return bool(text.strip()) and RULES[instruction](text, **options)


def loosened(text: str) -> list[str]:
    """Return ``text`` and its variants without its first line, its last line and asterisks, one of
    which has to follow an instruction in the loose score.
    """
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [variant for excerpt in (text, *cut) for variant in (excerpt, excerpt.replace("*", ""))]


def _holds(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation is {relation!r}; it must be 'less than' or 'at least'")
    return count < limit if relation == "less than" else count >= limit


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _parts(parts: Sequence[str]) -> list[str]:
    """Return the parts without blank ones at both ends; nothing if another one is blank."""
    if not all(part.strip() for part in parts[1:-1]):
        return []
    return [part.strip() for part in parts if part.strip()]


def _is_in(text: str, language: str) -> bool:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # or it draws
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:  # no letters, which counts as followed
        return True


def _pieces(kind: str, text: str) -> list[str]:
    import nltk

    pieces: list[str] = getattr(nltk, f"{kind}_tokenize")(text)
    return pieces


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    words = paragraphs[nth_paragraph - 1].split() if nth_paragraph <= count else []
    if not words:
        return False
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return count == num_paragraphs and word.lower() == first_word.lower()


def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return bool(re.search(POSTSCRIPTS.get(marker, marker.lower()), text.lower()))


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


RULES: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_count(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _holds(
        _count(keyword.strip(), text), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count(rf"\b{word}\b", text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _holds(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: _is_in(text, language),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _holds(
        len(_pieces("sent", text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(_parts(re.split(r"\s?\*\*\*\s?", text))) == num_paragraphs
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _holds(
        _count(r"\w+", text), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum("[" in piece for line in text.split("\n") for piece in line.split("]")[:-1])
        >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        _count(r"(?m)^[^\S\n]*\*[^\*].*$", text) + _count(r"(?m)^[^\S\n]*-.*$", text) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(word in text for word in CHOICES),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(highlight.strip("*").strip()) for highlight in re.findall(r"\*[^\n\*]*\*", text))
        + sum(bool(highlight.strip()) for highlight in re.findall(r"\*\*([^\n\*]*)\*\*", text))
        >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(
        line[line.find("<<") : line.rfind(">>") + 2].lstrip("<").rstrip(">").strip()
        for line in text.split("\n")
        if "<<" in line
    ),
    "combination:two_responses": lambda text: (
        len(parts := _parts(text.split("******"))) == 2 and parts[0] != parts[1]
    ),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "change_case:capital_word_frequency": (
        lambda text, capital_frequency, capital_relation: _holds(
            sum(map(str.isupper, _pieces("word", text))), capital_relation, capital_frequency
        )
    ),
    "change_case:english_capital": lambda text: text.isupper() and _is_in(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_in(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:quotation": lambda text: (
        len(text.strip()) > 1 and (text.strip()[0] == text.strip()[-1] == '"')
    ),
}
"""Rules by the id of the instruction, each with the text and the options of the instruction."""
