"""An agent of OpenAI's SDK that knows nothing of Tiller."""

import json
import os
import sys

from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(int(os.environ["TURNS"])):
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "Go on."})
print(json.dumps(messages))
