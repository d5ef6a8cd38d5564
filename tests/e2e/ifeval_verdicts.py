"""Compares verdicts of rl/tasks/instructions.py with those of lm-eval, in lm-eval's environment.

Usage: python ifeval_verdicts.py INSTRUCTIONS.py, with options by instruction as JSON in standard
input. Prints the number of texts that follow each instruction, and the texts that one side alone
accepts.
"""

import importlib.util
import json
import random
import sys

import langdetect
from lm_eval.tasks.ifeval.utils import (
    InputExample,
    test_instruction_following_loose,
    test_instruction_following_strict,
)

PARTS = [
    *(
        "Rain",
        "rain,",
        "the sun",
        "Dr. Who says it",
        "U.S. troops",
        "IT'S A WELL-KNOWN FACT",
        "So.",
    ),
    *(
        "\n\n",
        "\n\n\n",
        "\n",
        "***",
        "\n***\n",
        "******",
        "\n******\n",
        "[a b]",
        "[c\nd]",
        "\n* one",
    ),
    *("\n- two", "\n** three", "*high*", "**bold**", "* *", "<<title>>", "<< >>", "P.S. more"),
    *("P. P.S last", "Part 1", "Part 2", "part 3", '"', "'rain", '{"a": 1}', "```json\n", "```"),
    *(
        "My answer is no.",
        "The end.",
        "Say it.",
        "!",
        "?",
        "e.g. this",
        "Guten Tag, wie geht es dir",
    ),
    *("THE RAIN IN SPAIN", "This is a plain sentence about the weather.", "ÜBER", "7", "#", ""),
]
TEXTS = 1500


def main() -> None:
    spec = importlib.util.spec_from_file_location("instructions", sys.argv[1])
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    langdetect.DetectorFactory.seed = 0
    draws = random.Random(0)
    found = {}
    for name, options in json.load(sys.stdin).items():
        example = InputExample(0, [name], "", [options])
        count, differ = 0, []
        for _ in range(TEXTS if "language" not in name and "english" not in name else 60):
            joint = draws.choice(["", " "])
            text = joint.join(draws.choices(PARTS, k=draws.randint(0, 7)))
            text = f'"{text}"' if draws.random() < 0.1 else text
            text = text.upper() if draws.random() < 0.1 else text
            strict = ours.follows(text, name, options)
            loose = any(ours.follows(each, name, options) for each in ours.loosened(text))
            theirs = [
                judge(example, text).follow_all_instructions
                for judge in (test_instruction_following_strict, test_instruction_following_loose)
            ]
            count += strict
            if theirs != [strict, loose]:
                differ.append(text)
        found[name] = [count, differ[:3]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
