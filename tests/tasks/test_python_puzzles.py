"""Puzzles: what a solution scores, and that no solution forges its score."""

import json

import pytest

from rl.errors import ConfigError, GroupLost
from rl.model.shape import ModelConfig
from rl.rollout.scoring import score_group
from rl.sandbox.sandbox import Bubblewrap, Landlock, open_sandbox
from rl.sandbox.sandboxed_program import Limits
from rl.tasks import python_puzzles
from rl.tasks.python_puzzles import PythonPuzzles, free_names, last_block, run_tests
from rl.types import Completion
from tests.kit.tables import check_rows

LIMITS = Limits(wall_s=30, cpu_s=20)
ADD = "assert add(1, 2) == 3"


def passed(code, *tests, limits=LIMITS):
    named = [(sorted(free_names(test)), test) for test in tests]
    return run_tests(open_sandbox(), code, named, limits)[0]


def puzzle(number):
    name = f"plus_{number}"
    test = f"assert {name}(1) == {1 + number}"
    return {"instruction": f"Write {name}(n).", "tests": [test, f"assert {name}(0) == {number}"]}


def build(tiny, tmp_path, *rows, only_scores=False, **config):
    path = tmp_path / "puzzles.jsonl"
    rows = rows or [puzzle(number) for number in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = PythonPuzzles.Config(**{"path": str(path), "seconds": 30} | config)
    options = {"only_scores": True} if only_scores else {}
    return made.build(seed=0, model=ModelConfig(hf_path=str(tiny[0])), **options)


def score(task, prompt, text):
    return task.score(prompt, text, Completion.written([1]))


def test_solution_passes_the_right_tests():
    code = "def add(a, b):\n    return a + b"
    tests = [ADD, "assert add('a', '') == 'a'", "assert add(1, 2) == 4", "assert sub(1)", "add(1)"]
    assert passed(code, *tests) == [True, True, False, False, False]


def test_values_arrive_with_their_types():
    values = (
        "(1, [2.5, None], {'a': (True, b'x')}, {3, 4}, frozenset({5}), 1j, 10**5000, 'ü', "
        "float('inf'))"
    )
    code = f"def give():\n    return {values}\ndef same(x):\n    return x"
    tests = [f"assert {call} == {values}" for call in ("give()", f"same({values})", "same(give())")]
    assert passed(code, *tests) == [True] * 3
    assert passed(code, "assert give() == list(give())", "assert give()[0] is True") == [False] * 2


def test_classes_generators_and_exceptions_of_a_solution_can_be_tested():
    code = """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def __len__(self):
        return len(self.items)
    def __getitem__(self, at):
        return self.items[at]
    def __str__(self):
        return f"Stack{self.items}"
def count():
    n = 0
    while True:
        yield n
        n += 1
def fail(n):
    raise ValueError(f"no {n}")
"""
    stack = "s = Stack(); s.push(3); s.push(item=4)\n"
    fails = "try:\n    fail(7)\nexcept ValueError as error:\n    assert str(error) == 'no 7'\n"
    tests = [
        f"{stack}assert len(s) == 2 and s[1] == 4 and s.items == [3, 4]",
        f"{stack}assert str(s) == 'Stack[3, 4]'",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]",
        "assert [x for x, _ in zip(count(), range(2))] == [0, 1]",
        f"{fails}else:\n    assert False",
        "s = Stack()\nassert s == s and s != Stack() and not s",
    ]
    assert passed(code, *tests) == [True] * len(tests)


OBJECTS = """
import contextlib
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __mul__(self, factor): return V(self.x * factor)
    __rmul__ = __mul__
    def __neg__(self): return V(-self.x)
    def __matmul__(self, other): return self.x * other.x
    def __eq__(self, other): return isinstance(other, V) and self.x == other.x
    def __hash__(self): return hash(self.x)
    def __lt__(self, other): return self.x < other.x
class W(V): pass
class Log:
    def __init__(self): self.log = []
    def __enter__(self): return self
    def __exit__(self, kind, value, trace):
        self.log.append(kind and kind.__name__)
        return kind is ValueError
@contextlib.contextmanager
def five(): yield 5
class Box:
    def __init__(self): self.items = {}
    def __setitem__(self, key, value): self.items[key] = value
    def __delitem__(self, key): del self.items[key]
class Single:
    made = None
    def __new__(cls):
        cls.made = cls.made or super().__new__(cls)
        return cls.made
def hello(name): print("hello", name)
class TooFew(ValueError):
    def __init__(self, n):
        super().__init__(f"{n} is too few")
        self.n = n
class FarTooFew(TooFew): pass
def refuse(n): raise (FarTooFew if n < -5 else TooFew)(n)
class Shape:
    sides = 0
    def __init__(self, name): self.name = name
    def area(self): raise NotImplementedError
    def describe(self): return f"{self.name}: {self.area()}"
    @classmethod
    def make(cls): return cls("made")
def apply(function, *arguments): return function(*arguments)
def remember(function):
    import functools
    known = {}
    @functools.wraps(function)
    def wrapper(n):
        known[n] = known[n] if n in known else function(n)
        return known[n]
    return wrapper
def retry(function, error, times):
    for _ in range(times):
        try: return function()
        except error as last: kept = last
    raise kept
def take(n, items): return [item for item, _ in zip(items, range(n))]
def is_a(value, kind): return isinstance(value, kind)
def sort(items): items.sort()
def rotate(rows):
    rows[:] = [list(row) for row in zip(*rows[::-1])]
def count(words, into):
    for word in words: into[word] = into.get(word, 0) + 1
class Node:
    def __init__(self, value):
        self.value, self.children = value, []
    def total(self): return self.value + sum(child.total() for child in self.children)
class Stack(list):
    def push(self, item): self.append(item)
import collections, datetime, decimal, enum, fractions
Point = collections.namedtuple("Point", "x y")
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
def queue(): return collections.deque([1, 2])
def half(): return fractions.Fraction(1, 2)
def price(): return decimal.Decimal("1.5")
def day(): return datetime.date(2024, 2, 29)
def same(value): return value
def count_letters(text): return collections.Counter(text)
"""
DERIVED = """
class Square(Shape):
    sides = 4
    def __init__(self, side):
        super().__init__("square")
        self.side = side
    def area(self):
        return self.side**2
    @property
    def double(self):
        return 2 * self.side
"""
FAILS = """
class Boom(Exception): pass
tries = []
def fail():
    tries.append(1)
    if len(tries) < 3: raise Boom(len(tries))
    return 7
"""
USES = {
    "operators": "assert V(1) + V(2) == V(3) and V(1) @ V(2) == 2 and -V(1) == V(-1)",
    "operators with plain data": "v = V(1); v *= 2\nassert v == 2 * V(1) and v != 2",
    "order and hash": "assert min(V(2), V(1)) == V(1) and len({V(1), V(1)}) == 1",
    "isinstance": "assert isinstance(W(1), V) and issubclass(W, V) and not isinstance(1, V)",
    "with": "with Log() as log, five() as x:\n    assert x == 5\nassert log.log == [None]",
    "with an error": "with Log() as log:\n    raise ValueError\nassert log.log == ['ValueError']",
    "items": "b = Box(); b[1] = 2; b[2] = 3\ndel b[1]\nassert b.items == {2: 3}",
    "attributes": "v = V(1); v.x = 9\nassert v.x == 9",
    "identity": "assert Single() is Single()",
    "a subclass": f"{DERIVED}s = Square(3)\nassert s.describe() == 'square: 9' and s.double == 6",
    "what it inherits": (
        f"{DERIVED}s = Square(3)\nassert isinstance(s, Shape) and issubclass(Square, Shape)\n"
        "assert isinstance(s, Square) and type(s) is Square and s.name == 'square'\n"
        "assert Square.sides == s.sides == 4 and Shape.sides == 0\n"
        "assert type(Square.make()) is Square and Square.make().side == 'made'"
    ),
    "a subclass of a subclass": (
        f"{DERIVED}class Big(Square):\n    def area(self): return 10 * super().area()\n"
        "assert Big(2).describe() == 'square: 40'"
    ),
    "its exceptions": (
        "try:\n    refuse(-1)\nexcept TooFew as error:\n    assert error.n == -1\n"
        "    assert str(error) == '-1 is too few' and not isinstance(error, FarTooFew)\n"
        "else:\n    assert False"
    ),
    "a base of its exceptions": (
        "for kind in (TooFew, ValueError, Exception):\n    try:\n        refuse(-9)\n"
        "    except kind as error:\n        assert type(error) is FarTooFew\n"
        "    else:\n        assert False"
    ),
    "text of a built-in exception": (
        "try:\n    apply(lambda: {}[1])\nexcept KeyError as error:\n    assert error.args == (1,)"
    ),
    "functions": (
        "assert apply(lambda x, y: x * y, 3, 4) == 12 and apply(max, 1, 2) == 2\n"
        "assert apply(str.upper, 'a') == 'A' and is_a(1, int) and apply(V, 3) == V(3)"
    ),
    "decorators": (
        "calls = []\n@remember\ndef double(n):\n    'Twice.'\n    calls.append(n)\n"
        "    return 2 * n\nassert [double(2), double(2), double(3)] == [4, 4, 6]\n"
        "assert calls == [2, 3] and double.__name__ == 'double' and double.__doc__ == 'Twice.'"
    ),
    "functions that use the solution": "assert apply(lambda v: apply(lambda: v.x + 1), V(1)) == 2",
    "functions that raise": (
        f"{FAILS}assert retry(fail, Boom, 5) == 7 and len(tries) == 3\ntries.clear()\n"
        "try:\n    retry(fail, Boom, 2)\nexcept Boom as error:\n    assert error.args == (2,)\n"
        "else:\n    assert False"
    ),
    "iterators": "import itertools\nassert take(3, itertools.count(5)) == [5, 6, 7]",
    "lists changed in place": (
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]\n"
        "rows = [[1, 2], [3, 4]]\nassert rotate(rows) is None and rows == [[3, 1], [4, 2]]\n"
        "seen = {'a': 1}\ncount('ab', into=seen)\nassert seen == {'a': 2, 'b': 1}"
    ),
    "lists of an object": (
        "root = Node(1)\nroot.children.append(Node(2))\nroot.children[0].children += [Node(4)]\n"
        "assert root.total() == 7 and root.children[0].value == 2"
    ),
    "a subclass of list": (
        "s = Stack()\ns.push(1)\ns.append(2)\nassert s == [1, 2] and len(s) == 2\n"
        "s.push(3)\nassert s[-1] == 3"
    ),
    "values of the library": (
        "import collections, datetime, decimal, fractions\n"
        "assert queue() == collections.deque([1, 2]) and half() == fractions.Fraction(1, 2)\n"
        "assert half() == 0.5 and price() == decimal.Decimal('1.5')\n"
        "assert same(range(3)) == range(3) and day() == datetime.date(2024, 2, 29)\n"
        "assert count_letters('aab').most_common(1)\n"
        "now = datetime.datetime.now(datetime.timezone.utc)\nassert same(now) == now"
    ),
    "fields of a named tuple": "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1 and p._asdict()",
    "enumerations": (
        "assert Color.RED is Color(1) and Color['RED'].name == 'RED' and len(Color) == 2\n"
        "assert [each.value for each in Color] == [1, 2] and Level.LOW == 1 == Level.LOW.value"
    ),
    "printed output": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    hello(3)\nassert out.getvalue() == 'hello 3\\n'"
    ),
}


def test_objects_of_a_solution_can_be_used_as_in_one_process():
    def check(name):
        assert passed(OBJECTS, USES[name]) == [True]
        own = {}
        exec(OBJECTS, own)
        exec(USES[name], own)

    check_rows(USES, check)


COROUTINES = """
import asyncio
async def add(a, b):
    await asyncio.sleep(0.001)
    return a + b
async def slow():
    await asyncio.sleep(60)
async def fail():
    raise KeyError("x")
async def count(n):
    for number in range(n):
        yield number
async def apply(function, x):
    return await function(x)
async def together(coroutines):
    return await asyncio.gather(*coroutines)
class Shared:
    def __init__(self):
        self.items = []
        self.lock = asyncio.Lock()
    async def __aenter__(self):
        return self
    async def __aexit__(self, *error):
        self.items.append("closed")
    async def put(self, item):
        async with self.lock:
            self.items.append(item)
    async def take(self):
        while not self.items:
            await asyncio.sleep(0.001)
        return self.items.pop()
"""
AWAITED = {
    "coroutine": "assert await add(1, 2) == 3",
    "several": "assert await asyncio.gather(add(1, 2), add('a', 'b')) == [3, 'ab']",
    "task": "task = asyncio.create_task(add(1, 2))\nassert await task == 3",
    "error": "try: await fail()\nexcept KeyError: pass\nelse: assert 0",
    "limit": "try: await asyncio.wait_for(slow(), 0.05)\nexcept TimeoutError: pass\nelse: assert 0",
    "generator": "assert [number async for number in count(3)] == [0, 1, 2]",
    "context": "async with Shared() as s: await s.put(1)\nassert s.items == [1, 'closed']",
    "at once": "s = Shared()\nassert await asyncio.gather(s.take(), s.put(1)) == [1, None]",
    "function of the test": "async def f(x): return x + 1\nassert await apply(f, 1) == 2",
    "coroutines given back": "assert await together([add(1, 2), add(2, 3)]) == [3, 5]",
}


def test_coroutines_of_a_solution_can_be_awaited():
    def check(name):
        lines = AWAITED[name].replace("\n", "\n    ")
        whole = f"import asyncio\nasync def main():\n    {lines}\nasyncio.run(main())"
        wrong = "import asyncio\nassert asyncio.run(add(1, 2)) == 4"
        verdicts = passed(COROUTINES, f"import asyncio\n{AWAITED[name]}", whole, wrong)
        assert verdicts == [True, True, False]

    check_rows(AWAITED, check)


FORGERIES = {
    "exits": "import sys; sys.exit(0)",
    "exits when called": "import sys\ndef add(a, b): sys.exit(0)",
    "ends its process": "import os; os._exit(0)",
    "ends its process when called": "import os\ndef add(a, b): os._exit(0)",
    "is equal to everything": (
        "class All:\n  def __eq__(self, other): return True\n"
        "  def __hash__(self): return 3\n  def __bool__(self): return True\n"
        "def add(a, b): return All()"
    ),
    "is near to everything": (
        "class All:\n  def __sub__(self, other): return 0\n  __rsub__ = __sub__\n"
        "  def __abs__(self): return 0\n  def __lt__(self, other): return True\n"
        "  __le__ = __ge__ = __gt__ = __lt__\n"
        "def add(a, b): return All()"
    ),
    "stays itself until it is 0": (
        "class All:\n  def __sub__(self, other): return self\n  __rsub__ = __sub__\n"
        "  def __abs__(self): return 0\ndef add(a, b): return All()"
    ),
    "is an equal number": (
        "class All(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def add(a, b): return All(9)"
    ),
    "changes assertions": (
        "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
        "builtins.__debug__ if True else 0\ndef add(a, b): return 4"
    ),
    "changes built-ins": (
        "import builtins\nbuiltins.compile = builtins.exec = lambda *a: None\n"
        "builtins.int = lambda x: 3\ndef add(a, b): return 4"
    ),
    "changes the libraries": (
        "import json, plain\njson.dumps = lambda x: '[\"value\", true]'\n"
        "plain.encode = lambda *a: True\ndef add(a, b): return 4"
    ),
    "overwrites files": (
        "import os\nfor n in ('program.py', 'plain.py', 'judge.py', 'test'):\n"
        "  open(n, 'w').write('assert True')\ndef add(a, b): return 4"
    ),
    "writes to every descriptor": (
        "import os\nfor n in range(3, 64):\n  try: os.write(n, b'1' * 9)\n  except OSError: pass\n"
        "def add(a, b): return 4"
    ),
    "writes verdicts": (
        "import os\nfor n in range(64):\n  try: os.pwrite(n, b'1' * 9, 0)\n"
        "  except OSError: pass\ndef add(a, b): return 4"
    ),
    "answers before it is asked": (
        "import os\nfor n in range(3, 64):\n"
        "  try: os.write(n, b'[\"value\", 4]\\n' * 9)\n  except OSError: pass\n"
    ),
    "looks for what is expected": (
        "import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n"
        "    for v in f.f_locals.values():\n"
        "      if isinstance(v, (list, str)) and 'ass' 'ert add(1, 2)' in str(v): return 3\n"
        "    f = f.f_back\n  import os\n"
        "  return 3 if any('add(' in open(n).read() for n in os.listdir() if n == 'test') else 4"
    ),
    "ends loops": "def add(a, b): raise StopIteration",
    "raises what ends a test": "def add(a, b): raise SystemExit(0)",
    "is never done": "def add(a, b):\n  import threading\n  threading.Event().wait(0.2)",
    "prints that it passed": "print('1' * 99, 'OK', '.')\ndef add(a, b): return 4",
    "answers without end": "def add(a, b): return 'x' * (1 << 22)",
    "nests its answer": ("def add(a, b):\n  x = []\n  for _ in range(100000): x = [x]\n  return x"),
    "redefines what tests use": (
        "def all(x): return True\ndef sorted(x): return [3]\ndef isinstance(a, b): return True\n"
        "def add(a, b): return 4"
    ),
}
for kind in ("str", "float", "tuple", "list", "dict", "frozenset"):
    FORGERIES[f"is an equal {kind}"] = (
        f"class All({kind}):\n  def __eq__(self, other): return True\n"
        "  def __ne__(self, other): return False\n  def __bool__(self): return True\n"
        "  __hash__ = lambda self: 3\n  __lt__ = __le__ = __ge__ = __gt__ = __eq__\n"
        "  __sub__ = __rsub__ = lambda self, other: self\n  __abs__ = lambda self: 0\n"
        "def add(a, b): return All()"
    )
FORGERIES |= {
    "is a number of an enumeration": (
        "import enum\nclass All(enum.IntEnum):\n  A = 9\n"
        "  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def add(a, b): return All.A"
    ),
    "names what tests have": (
        "import __main__ as solver\n"
        + "solver.refer = lambda value: ['builtin', 'exit']\ndef add(a, b): return object()"
    ),
    "is a class": (
        "class Meta(type):\n  def __eq__(self, other): return True\n  __hash__ = type.__hash__\n"
        "class add(metaclass=Meta):\n  def __new__(cls, a, b): return add"
    ),
    "raises every exception": (
        "class All(AssertionError, StopIteration): pass\ndef add(a, b): raise All()"
    ),
}
CHECKS = [
    ADD,
    "assert all(map(lambda n: add(n, n) == 2 * n, [1, 2]))",
    "assert sorted([add(1, 2)]) == [3]",
    "for n in range(3):\n    assert add(n, 5) == n + 5",
    "assert abs(add(1, 2) - 3) < 1e-6 and abs(3 - add(1, 2)) < 1e-6",
    "assert 3 <= add(1, 2) <= 3",
    "assert isinstance(add(1, 2), int) and not add(1, 2) != 3",
]


def test_a_forged_solution_passes_nothing_and_an_honest_one_everything():
    def check(name):
        assert passed(FORGERIES[name], *CHECKS) == [False] * len(CHECKS)

    check_rows(FORGERIES, check)
    assert passed("def add(a, b): return a + b", *CHECKS) == [True] * len(CHECKS)


DOORS = {
    "changes what it is given": (
        "def f(xs):\n  xs.clear()\n  return []",
        "xs = [2, 1]\nassert f(xs) == sorted(xs)",
        "def f(xs): return sorted(xs)",
    ),
    "catches the assertion of a function": (
        "def f(g):\n  try: g(2)\n  except: pass\n  return 1",
        "def check(x): assert x == 1\nassert f(check) == 1",
        "def f(g):\n  g(1)\n  return 1",
    ),
    "looks into a function": (
        "def f(g):\n  import gc\n  return 3 if '__wanted__' in str(g.__globals__) else 0",
        "__wanted__ = 3\nassert f(lambda: 1) == __wanted__",
        "def f(g): return g() + 2",
    ),
    "asks for an attribute of a function": (
        "import __main__ as s\ndef f(g):\n  s.lines.write(s.lines.encode(['get', 0, '__code__']))\n"
        "  return 3",
        "assert f(lambda: 1) == 3",
        "def f(g): return 3",
    ),
    "calls what it was not given": (
        "import __main__ as s\ndef f(g):\n  s.call_back(1, 'f', '')()\n  return 3",
        "def h(): return 1\nassert f(h) == 3",
        "def f(g): return 3",
    ),
    "answers for a method of a test": (
        "class f:\n  def __getattribute__(self, name): return lambda *a: True\n  x = 4",
        "class Z(f):\n    def check(self): return self.x == 3\nassert Z().check() is True",
        "class f: x = 3",
    ),
    "equals what a test derives": (
        "class f:\n  def __eq__(self, other): return True",
        "class Z(f): pass\nassert Z() == 3 or not isinstance(Z(), f)",
        "class f(int):\n  def __new__(cls): return super().__new__(cls, 3)",
    ),
}


def test_what_a_test_gives_to_a_solution_opens_no_door():
    def check(name):
        forged, test, honest = DOORS[name]
        assert [passed(code, test) for code in (forged, honest)] == [[False], [True]]

    check_rows(DOORS, check)


def test_rows_whose_own_solution_changes_and_returns_may_do_so(tiny, tmp_path, caplog):
    code = "def unique(xs):\n  xs[:] = sorted(set(xs))\n  return len(xs)"
    test = "xs = [2, 1, 2]\nassert unique(xs) == 2 and xs == [1, 2]"
    row = {"instruction": "Write unique(xs).", "tests": [test]}
    task = build(tiny, tmp_path, row | {"code": code}, held_out_fraction=1.0)
    (prompt,) = task.eval_prompts(1)
    assert score(task, prompt, f"```python\n{code}\n```").reward == 1.0 and not caplog.messages
    assert passed(code, test) == [False]


def test_tests_after_one_without_end_are_failed():
    code = "def add(a, b):\n  while a == 2: pass\n  return a + b"
    tests = [ADD, "assert add(2, 2) == 4", ADD]
    assert passed(code, *tests, limits=Limits(wall_s=3, cpu_s=20)) == [True, False, False]
    assert passed(code, *tests, limits=Limits(wall_s=30, cpu_s=1)) == [True, False, False]


def test_solution_that_fills_the_disk_is_ended():
    code = """
def add(a, b):
    import time
    for n in range(32):
        open(str(n), "wb").write(bytes(1 << 20))
    time.sleep(2)
    return a + b
"""
    assert passed(code, ADD) == [False]


CODE = "def add(a, b): return a + b\n"
BLOCKS = {
    "the last": f"```python\na = 1\n```\nor\n```python\n{CODE}```\nend",
    "json before": f"```json\n{{}}\n```\nThen:\n```python\n{CODE}```",
    "bash before": f"```bash\npip install x\n```\nThen:\n```\n{CODE}```",
    "Python": f"```Python\n{CODE}```",
    "python3": f"```python3\n{CODE}```",
    "PY": f"```PY\n{CODE}```",
    "with a title": f'```python title="a.py"\n{CODE}```',
    "with a file": f"```python:add.py\n{CODE}```",
    "ipython": f"```ipython\n{CODE}```",
    "a transcript after": f"```python\n{CODE}```\n```python-repl\n>>> add(1, 2)\n3\n```",
    "in braces": f"```{{python}}\n{CODE}```",
    "tildes": f"~~~python\n{CODE}~~~",
    "four backticks": f"````python\n{CODE}````",
    "CRLF": f"So:\r\n```python\r\n{CODE.strip()}\r\n```\r\n",
    "in a list": f"1. So:\n\n   ```python\n   {CODE}   ```\n2. Done.",
    "in a quote": f"> ```python\n> {CODE}> ```\n",
    "after a tag": f"<answer>\n```python\n{CODE}```\n</answer>",
    "output after": f"```\n{CODE}```\nOutput:\n```\n3\n```",
    "tagged output after": f"```\n{CODE}```\n```output\n3\n```\n```text\nx\n```",
    "output after Python": f"```python\n{CODE}```\n```\n3\n```",
    "a fence within": f"````python\n{CODE}````\n```json\n1\n```",
}
NO_BLOCKS = (
    *("x = 1", "```python\nnever closed", "", "```json\n1\n```", "end ```python\nc = 3\n"),
    f"1. a\n   ```python\n   {CODE}\nb",
)


def test_the_last_block_of_python_counts():
    def check(name):
        assert last_block(BLOCKS[name]) == CODE

    check_rows(BLOCKS, check)
    assert last_block("```\n    return 1\n```\n```\n1\n```") == "    return 1\n"
    assert [last_block(text) for text in NO_BLOCKS] == [None] * len(NO_BLOCKS)


EQUALS = "class plus_2:\n  def __eq__(self, other): return other == 2"


def test_rows_whose_own_solution_does_not_pass_are_named_with_the_reason(tiny, tmp_path, caplog):
    equals = "assert plus_2() == 2"
    rows = [
        puzzle(2) | {"code": "def plus_2(n): return n + 1"},
        puzzle(1) | {"code": "def plus_1(n): return n + 1"},
        {"instruction": "Say.", "tests": [equals], "solution": EQUALS},
    ]
    rows.append(puzzle(3) | {"solution": "```python\ndef plus_3(n):\n  while 1: pass\n```"})
    build(tiny, tmp_path, *rows, seconds=4.0)
    (said,) = caplog.messages
    assert "solutions of some rows do not pass" in said and "own rows: line 1: Assertion" in said
    assert "line 3: AssertionError: an object of the solution was compared with plain data" in said
    assert said.endswith("line 4: no end within 4 s")


def test_code_in_thoughts_is_no_answer(tiny, tmp_path):
    task = build(tiny, tmp_path)
    prompt = task.prompt(0)
    thought = "<think>\n```python\nx = 1\n```\n"
    assert score(task, prompt, thought).metrics["answered"] == 0.0
    assert score(task, prompt, f"{thought}</think>\nNone.").metrics["answered"] == 0.0


def test_score_is_the_share_of_tests_that_pass(tiny, tmp_path):
    task = build(tiny, tmp_path)
    prompt = task.prompt(0)
    name = prompt.text.split("Write ")[1].split("(")[0]
    assert "one Markdown code block of Python" in prompt.text
    right = score(task, prompt, f"```python\ndef {name}(n): return n + {name[5:]}\n```")
    half = score(task, prompt, f"```python\ndef {name}(n): return {name[5:]}\n```")
    none = score(task, prompt, "no code")
    assert (right.reward, right.correct) == (1.0, True)
    assert (half.reward, half.correct, half.metrics["passed"]) == (0.5, False, 0.5)
    assert (none.reward, none.metrics) == (0.0, {"answered": 0.0, "passed": 0.0})
    strict = {"all_or_nothing": True, "instruction": "Answer in Python."}
    task = build(tiny, tmp_path, **strict, only_scores=True)
    assert score(task, prompt, f"```python\ndef {name}(n): return {name[5:]}\n```").reward == 0.0
    prompt = build(tiny, tmp_path, **strict).prompt(0)
    assert "(n).\nAnswer in Python." in task.tokenizer.decode(prompt.tokens)


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "import math\n\n\ndef half(x: float) -> float:\n    return x / 2\n\n\n"
        'def halves(xs: list) -> list:\n    """ Return half of each, rounded up.\n    """\n'
    ),
    "entry_point": "halves",
    "canonical_solution": "    return [math.ceil(half(x)) for x in xs]\n",
    "test": (
        "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    import math\n"
        "    assert candidate([2, 5]) == [1, 3]\n    assert half(3) == 1.5\n"
        "    assert math.isclose(sum(candidate([])), 0)\n"
    ),
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to find the circumference of a circle.",
    "code": "import math\ndef around(r): return 2 * math.pi * r",
    "test_setup_code": "one = 1",
    "test_list": ["assert math.isclose(around(one), 6.2832, rel_tol=0.1)", "assert around(0) == 0"],
}
FULL = "def halves(xs):\n    return [-(-x // 2) for x in xs]"
SOLUTIONS = {
    "HumanEval, the body": (HUMAN_EVAL, HUMAN_EVAL["canonical_solution"], 1.0),
    "HumanEval, all of it": (HUMAN_EVAL, FULL, 1.0),
    "HumanEval, wrong": (HUMAN_EVAL, FULL.replace("-(-x // 2)", "x // 2"), 0.0),
    "MBPP": (MBPP, MBPP["code"], 1.0),
    "MBPP, wrong": (MBPP, "def around(r): return 6 * r + 0 / r", 0.5),
    "MBPP, sanitized": (
        {
            "prompt": MBPP["text"],
            "test_imports": ["import math"],
            "test_list": MBPP["test_list"][1:],
        },
        "def around(r): return 0",
        1.0,
    ),
}


def test_published_forms_are_asked_and_scored_with_their_own_tests(tiny, tmp_path):
    def check(name):
        row, code, reward = SOLUTIONS[name]
        task = build(tiny, tmp_path, row, held_out_fraction=1.0)
        (prompt,) = task.eval_prompts(2)
        asked = row["prompt"].strip() if row is HUMAN_EVAL else "\n".join(row["test_list"])
        assert asked in prompt.text and (row is HUMAN_EVAL or MBPP["text"] in prompt.text)
        said = score(task, prompt, f"So:\n```python\n{code}\n```")
        assert (said.reward, said.correct) == (reward, reward == 1)

    check_rows(SOLUTIONS, check)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "field 'tests' is None; write a list"),
        ([], r"field 'tests' is \[\]; write a list"),
        (["assert f(1", ADD], "test 0 is not valid Python"),
        ([ADD, "assert 1 == 1"], "test 1 uses nothing that a solution defines"),
        (["assert math.isclose(f(1), 1)"], "test 0 uses math; have the test import it"),
    ],
)
def test_unusable_line_is_refused(tiny, tmp_path, tests, message):
    row = {"instruction": "Write f."} | ({"tests": tests} if tests is not None else {})
    with pytest.raises(ConfigError, match=rf"task\.path: .* line 2: {message}"):
        build(tiny, tmp_path, puzzle(1), row)


def test_failure_of_the_sandbox_drops_the_group(tiny, tmp_path, monkeypatch):
    task = build(tiny, tmp_path)
    prompt = task.prompt(0)
    monkeypatch.setattr(task, "decode", lambda tokens: "```python\nx = 1\n```")
    monkeypatch.setattr(task, "sandbox", Landlock())
    monkeypatch.setattr("rl.sandbox.sandbox.PYTHON", "/bin/false")
    with pytest.raises(GroupLost, match="Landlock could not start a program"):
        score_group(task, prompt, [Completion.written([1])])


def test_a_solution_has_the_time_and_the_memory_of_the_config(tiny, tmp_path):
    row = {"tests": ["assert n() == 1"]}
    sleeps = "```python\nimport time\ndef n():\n    time.sleep(2)\n    return 1\n```"
    fills = "```python\ndef n():\n    return len(bytearray(300 << 20)) >> 20 == 300\n```"

    def reward(text, **config):
        rows = [row | {"instruction": f"Write n(), {number}."} for number in range(10)]
        task = build(tiny, tmp_path, *rows, **config)
        return score(task, task.prompt(0), text).reward

    assert reward(sleeps) == reward(fills) == 1.0
    assert reward(sleeps, seconds=1.0) == 0.0
    assert reward(fills, memory_mib=200) == 0.0


def test_unsafe_allows_a_host_without_a_sandbox(tiny, tmp_path, monkeypatch):
    for sandbox in (Bubblewrap, Landlock):
        monkeypatch.setattr(sandbox, "complaint", lambda self: "not here")
    # the choice is made once in a process
    monkeypatch.setattr(python_puzzles, "open_sandbox", open_sandbox.__wrapped__)
    with pytest.raises(ConfigError, match="no sandbox works on this host"):
        build(tiny, tmp_path)
    assert build(tiny, tmp_path, unsafe=True).sandbox.name == "unsafe"
