"""The agent of `external_agent.py`: a program that knows of no training. It adds three digits in two calls of a model.

row {"numbers": "1 3 2"}    "1+3" -> "4"    then, in the same conversation, "4+2" -> "6"
"""

import json
import os
import urllib.request
from pathlib import Path


def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
        return json.load(answer)


def ask(conversation, text):
    """The model's answer, which the conversation has from then on."""
    conversation.append({"role": "user", "content": text})
    told = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": conversation})
    conversation.append(told["choices"][0]["message"])
    return conversation[-1]["content"]


a, b, c = json.loads(Path(os.environ["RONDO_ROW"]).read_bytes())["numbers"].split()
conversation = []
first = ask(conversation, f"{a}+{b}")
second = ask(conversation, f"{first.rstrip('?')[:2]}+{c}")
right = (first == str(int(a) + int(b))) + (second == str(int(a) + int(b) + int(c)))
post(os.environ["RONDO_REWARD_URL"], right / 2)
