"""Prompts that are numbers alone."""


class NumberedPrompts:
    """First base of tasks whose prompts have only a number. No prompts are held out."""

    def prompt(self, prompt_id):
        return self.seed_prompt(prompt_id)

    def eval_prompts(self, count):
        return []
