"""General questions to train drafters of a chat model on: small programs, word problems, writing, explanation, advice, extraction.

Made from templates, so that no evaluation set is touched; the answers come from the target itself (data/regenerate.py).
"""

import itertools
import random
from collections.abc import Callable

_TOPICS = (
    "a rainy weekend", "a small bakery", "autumn leaves", "bees and flowers", "bicycles", "black holes", "bread", "bridges", "camels",
    "chess", "climate", "clocks", "coffee", "coral reefs", "deserts", "dinosaurs", "dreams", "earthquakes", "electric cars", "elephants",
    "exercise", "fire safety", "fishing", "folk music", "friendship", "gardening", "glass", "gold", "good sleep", "gravity", "healthy food",
    "honey", "icebergs", "jazz", "kindness", "learning a language", "libraries", "lighthouses", "magnets", "maps", "medieval castles",
    "memory", "money for children", "mountains", "old trains", "online safety", "origami", "owls", "paper", "patience", "photosynthesis",
    "pottery", "public speaking", "rainbows", "recycling", "rivers", "robots", "running a marathon", "salt", "satellites", "saving water",
    "ships", "silk", "snow", "soap", "solar power", "stars", "storms", "stress at work", "tea", "team work", "the Moon",
    "the first day at school", "the human heart", "the printing press", "the stock market", "the telephone", "the water cycle", "theatre",
    "tides", "time management", "tomatoes", "trees in cities", "vaccines", "volcanoes", "weather forecasts", "whales", "wind power", "wood",
    "writing letters")

_REQUESTS = (
    "Write a short story about {}.", "Write a poem about {}.", "Explain {} to a child of ten.", "Give me five interesting facts about {}.",
    "Write a friendly email that invites colleagues to a talk about {}.", "What should a beginner know about {}?",
    "Write an outline for a blog post about {}.", "List the advantages and disadvantages of {}.",
    "Compose a short dialogue between two friends about {}.", "Why does {} matter today? Answer in two paragraphs.",
    "Suggest three titles for an article about {} and say why each one works.",
    "You are a teacher. Prepare a lesson of 30 minutes about {}.", "Write a formal letter to the city council about {}.",
    "Describe {} in one vivid paragraph.", "What are common mistakes or myths about {}?",
    "Make a table with two columns, question and answer, about {}.", "Write a product description that has to do with {}.",
    "Summarise in three sentences what is known about {}.", "Pretend to be a travel guide and talk about {}.",
    "How would you plan a project about {} step by step?")

_OBJECTS = (
    "a list of integers", "a string", "a list of strings", "a dictionary", "two lists", "a list of tuples", "a matrix", "a sentence")
_ACTIONS = (
    "return the largest element of {}", "remove duplicates from {} and keep the order", "reverse {}",
    "count how often each element occurs in {}", "check whether {} is sorted", "sort {} by length",
    "find the second smallest element of {}", "split {} into chunks of size n", "return the elements of {} at even positions",
    "check whether {} is empty or holds only zeros", "merge {} with another one of the same kind", "find the most common element of {}",
    "rotate {} by k places", "convert {} to JSON", "return True if {} is a palindrome", "replace every occurrence of x by y in {}",
    "compute a checksum of {}", "find the first repeated element of {}", "filter out negative or empty values of {}",
    "flatten {} if it is nested", "return the index of the last occurrence of x in {}", "interleave {} with another one",
    "swap the first and the last element of {}")
_PROGRAMS = (
    "Write a Python function to {}.", "Write a function in Python that can {}. Add a docstring and two assertions.",
    "Using Python, {}. Explain your code briefly.")

_NAMES = (
    "Ali", "Bea", "Carlos", "Dana", "Erik", "Fatima", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mara", "Nils", "Omar", "Priya")
_JOBS = ("nurse", "carpenter", "pilot", "teacher", "cook", "gardener", "programmer", "painter", "driver", "librarian")
_CITIES = ("Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Accra", "Delhi", "Quito", "Turin", "Perth")
_GOODS = ("notebooks", "oranges", "tickets", "bricks", "candles", "plants", "shirts", "tiles")
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def general(seed: int = 0) -> list[tuple[str, str]]:
  """(kind, question) pairs in a random order that `seed` fixes; kinds: writing, programs, problems, extraction."""
  rng = random.Random(seed)
  out = [("writing", r.format(t)) for r, t in itertools.product(_REQUESTS, _TOPICS)]
  out += [("programs", p.format(a.format(o))) for p, a, o in itertools.product(_PROGRAMS, _ACTIONS, _OBJECTS)]
  out += [("problems", rng.choice(_PROBLEMS)(rng) + rng.choice(("", STEPS))) for _ in range(1500)]
  out += [("extraction", _extraction(rng)) for _ in range(500)]
  rng.shuffle(out)
  return out


def _cost(rng: random.Random) -> str:
  a, b, c = rng.randint(2, 20), rng.randint(2, 30), rng.randint(1, 9)
  what, other = rng.sample(_GOODS, 2)
  return (f"{rng.choice(_NAMES)} buys {a} {what} for ${b} each and {c} {other} for half that price. "
          "How much does everything cost in dollars?")


def _journey(rng: random.Random) -> str:
  v, t, w = rng.randint(4, 18) * 5, rng.randint(2, 6), rng.randint(4, 18) * 5
  return (f"A train travels at {v} km/h for {t} hours and then at {w} km/h for another {rng.randint(1, 5)} hours. "
          "How far does it travel in total?")


def _share(rng: random.Random) -> str:
  return (f"{rng.choice(_NAMES)} has {rng.randint(20, 200)} {rng.choice(_GOODS)} "
          f"and gives {rng.choice((10, 20, 25, 50))}% of them to a friend. "
          f"Then {rng.randint(2, 15)} more are lost. How many are left?")


def _equation(rng: random.Random) -> str:
  a, b, x = rng.randint(2, 12), rng.randint(1, 30), rng.randint(-9, 15)
  return f"Solve the equation {a}x + {b} = {a * x + b} for x."


def _area(rng: random.Random) -> str:
  return f"A rectangle is {rng.randint(3, 40)} cm long and {rng.randint(2, 25)} cm wide. What are its area and its perimeter?"


def _product(rng: random.Random) -> str:
  return f"What is {rng.randint(11, 99)} times {rng.randint(11, 99)}, minus {rng.randint(2, 500)}?"


_PROBLEMS: tuple[Callable[[random.Random], str], ...] = (_cost, _journey, _share, _equation, _area, _product)


def _extraction(rng: random.Random) -> str:
  people = rng.sample(_NAMES, 3)
  text = " ".join(
      f"{p}, a {rng.choice(_JOBS)} of {rng.randint(20, 65)} from {rng.choice(_CITIES)}, "
      f"ordered {rng.randint(2, 40)} {rng.choice(_GOODS)}." for p in people)
  asked = rng.choice((
      "List the name, age and city of every person as JSON.", "Make a table of the persons with their job and their order.",
      "Who is the oldest? Answer with the name and the age.", "Which cities are mentioned? Answer with a list.",
      "Summarise the text in one sentence."))
  return f"{asked}\n\n{text}"
