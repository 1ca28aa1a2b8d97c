"""Run by test_chat.py in a terminal of its own: the real chat with a model that answers by rule.

python chat_driver.py CONTEXT DELAY HISTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fake_model import FakeModel

from strata.config import Config
from strata.interfaces.chat import chat
from strata.interfaces.line_reader import history_path, make_reader
from strata.interfaces.session import Session

if __name__ == "__main__":
    model = FakeModel(context=int(sys.argv[1]), delay=float(sys.argv[2]))
    code = chat(Session(model, Config()), make_reader(history_path(sys.argv[3])))
    print(f"calls {model.engine.calls} open {model.engine.open}")
    sys.exit(code)
