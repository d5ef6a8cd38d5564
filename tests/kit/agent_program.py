"""An agent of OpenAI's SDK that knows nothing of Tiller."""

import json
import os
import sys

from openai import BadRequestError, OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(int(os.environ["TURNS"])):
    try:
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    except BadRequestError as error:
        if os.environ.get("LOSES_TOOL") == "1":
            print(error, file=sys.stderr)
            raise ConnectionError("the tool server refused the connection") from None
        raise
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "Go on."})
print(json.dumps(messages))
