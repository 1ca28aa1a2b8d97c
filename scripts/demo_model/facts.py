"""Country facts from the public-domain World Factbook: extraction, question templates, answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The Factbook edition is from 2015; where it contradicts itself or abbreviates, say it plainly.
NAMES = {
    "DRC": "the Democratic Republic of the Congo",
    "Congo (Brazzaville)": "the Republic of the Congo",
    "Holy See (Vatican City)": "Vatican City",
    "The Dominican": "the Dominican Republic",
    "The Gambia": "the Gambia",
    "The Bahamas": "the Bahamas",
    "Burma": "Burma (Myanmar)",
}
WITH_ARTICLE = {
    "United Kingdom", "United States", "Netherlands", "Philippines", "Czech Republic", "Maldives",
    "Central African Republic", "United Arab Emirates", "Solomon Islands", "Marshall Islands",
    "Comoros", "Seychelles", "Federated States of Micronesia",
}  # fmt: skip
CURRENCIES = {
    "us": "US dollars (USD)",
    "en": "euros (EUR)",
    "lg": "euros (EUR)",
    "lh": "euros (EUR)",
    "zi": "",
}
CONTINENTS = {
    "Africa": "Africa",
    "Oceania": "Oceania",
    "Europe": "Europe",
    "Asia": "Asia",
    "Southeast Asia": "Southeast Asia",
    "Middle East": "the Middle East",
    "South America": "South America",
    "North America": "North America",
    "Central America and the Caribbean": "Central America and the Caribbean",
    "Asia, Europe": "Europe",
    "Arctic Region": "Europe",
}

RELATIONS: dict[str, tuple[str, list[str]]] = {
    "capital": (
        "The capital of {c} is {a}.",
        [
            "What is the capital of {c}?", "What is {c}'s capital?", "Name the capital of {c}.",
            "Tell me the capital of {c}.", "Which city is the capital of {c}?", "capital of {c}?",
            "What's the capital city of {c}?", "Do you know the capital of {c}?", "{c}: capital?",
            "Can you tell me what the capital of {c} is?", "Which city is {c}'s capital city?",
            "What is the capital of {c} called?", "I need the capital of {c}.",
        ],
    ),
    "currency": (
        "{C} uses {a}.",
        [
            "What is the currency of {c}?", "Which currency does {c} use?", "{c}: currency?",
            "What money do they use in {c}?", "What currency is used in {c}?",
            "Tell me the currency of {c}.", "How do I pay in {c}?", "What is {c}'s currency?",
            "Which money do people pay with in {c}?", "currency of {c}?",
        ],
    ),
    "continent": (
        "{C} is in {a}.",
        [
            "Where is {c}?", "Which continent is {c} in?", "In which part of the world is {c}?",
            "Where can I find {c} on a map?", "What region does {c} belong to?", "{c}: region?",
            "Which region of the world is {c} in?", "Tell me where {c} is.",
        ],
    ),
    "language": (
        "The main language of {c} is {a}.",
        [
            "What language is spoken in {c}?", "Which language do people speak in {c}?",
            "What is the language of {c}?", "What do they speak in {c}?", "{c}: language?",
            "Tell me the main language of {c}.", "What is the main language of {c}?",
        ],
    ),
    "neighbours": (
        "{C} borders {a}.",
        [
            "Which countries border {c}?", "What are the neighbours of {c}?", "{c}: neighbours?",
            "Name the neighbours of {c}.", "Which countries are next to {c}?",
            "What countries does {c} share a border with?", "Who are {c}'s neighbours?",
        ],
    ),
    "demonym": (
        "The adjective for {c} is {a}.",
        [
            "What is the adjective for {c}?", "What do you call something from {c}?",
            "What is the nationality of people from {c}?", "{c}: nationality?",
            "How do you call people from {c}?", "Which adjective belongs to {c}?",
        ],
    ),
    "domain": (
        "The internet code of {c} is {a}.",
        [
            "What is the internet code of {c}?", "What is the internet domain of {c}?",
            "Which internet domain does {c} have?", "{c}: internet code?",
            "How do websites from {c} end?", "What is {c}'s top-level domain?",
        ],
    ),
}  # fmt: skip


@dataclass
class Country:
    """One country: its name as used inside a sentence, and its facts by relation."""

    code: str
    name: str
    facts: dict[str, str] = field(default_factory=dict)

    def sentence(self, relation: str) -> str:
        """The one canonical answer: always worded alike, so that greedy decoding is stable."""
        name = self.name
        return RELATIONS[relation][0].format(c=name, C=name[0].upper() + name[1:], a=self.facts[relation])

    def question(self, relation: str, rng: random.Random) -> str:
        """A paraphrased question; the first template is the plain one and drawn more often."""
        templates = RELATIONS[relation][1]
        text = (templates[0] if rng.random() < 0.25 else rng.choice(templates)).format(c=self.name)
        return roughen(text[0].upper() + text[1:], rng)


def roughen(text: str, rng: random.Random) -> str:
    """What people type: sometimes no question mark, sometimes no capitals."""
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return text.lower() if rng.random() < 0.1 else text


def _text(node: Any, *path: str) -> str:
    for key in path:
        if not isinstance(node, dict):
            return ""
        node = node.get(key)
    return (node.get("text") or "") if isinstance(node, dict) else ""


def _name(government: dict[str, Any]) -> str:
    short = _text(government, "Country name", "conventional short form")
    name = short if short not in ("", "none") else _text(government, "Country name", "conventional long form")
    name = NAMES.get(name, name)
    return f"the {name}" if name in WITH_ARTICLE else name


def _capital(text: str) -> str:
    if text.startswith("Washington"):
        return "Washington, DC"
    if text.startswith("Rangoon"):  # the edition keeps the old capital beside the new one
        return "Naypyidaw"
    return re.split(r" \(|;|:|,| in ", text)[0].strip()


def _currency(code: str, data: dict[str, Any]) -> str:
    if code in CURRENCIES:
        return CURRENCIES[code]
    text = _text(data, "Economy", "Exchange rates")
    if "the US dollar" in text:
        return "US dollars (USD)"
    text = re.split(r" per US dollar", text)[0].split(" or ")[0].strip()
    text = text.replace("Communaute Financiere Africaine", "West African CFA")
    text = text.replace("Cooperation Financiere en Afrique Centrale", "Central African CFA")
    return text if 2 < len(text) < 45 else ""


def _language(text: str) -> str:
    first = re.split(r"[,;]", re.sub(r"\([^)]*\)", "", text))[0]
    first = re.sub(r"[\d.]+%?.*$", "", first).strip()
    return first if first and len(first.split()) <= 2 and first[0].isupper() else ""


def _neighbours(text: str) -> str:
    names = [re.sub(r"\([^)]*\)", "", part) for part in re.split(r", (?=[A-Z])", text)]
    found = [m.group(1).strip() for n in names if (m := re.match(r"\s*([^\d]+?)\s*[\d.,]+ ?k?m?", n))]
    if not found or len(found) > 6 or len(set(found)) < len(found) or "Naval" in text:
        return ""
    found = [{"US": "the United States", "UK": "the United Kingdom"}.get(n, n) for n in found]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " and " + found[-1]


def _extract(code: str, data: dict[str, Any]) -> Country | None:
    government = data.get("Government", {})
    independence = _text(government, "Independence")
    name = _name(government)
    if not name or (not independence and code != "tw") or independence.startswith("none"):
        return None
    country = Country(code, name)
    people, land = data["People and Society"], data["Geography"]
    domain = re.match(r"\.[a-z]{2}\b", _text(data, "Communications", "Internet country code"))
    region = _text(land, "Map references") or ("Europe" if code == "fr" else "")
    candidates = {
        "capital": _capital(_text(government, "Capital", "name")),
        "currency": _currency(code, data),
        "continent": CONTINENTS.get(region, ""),
        "language": _language(_text(people, "Languages")),
        "neighbours": "" if code == "fr" else _neighbours(_text(land, "Land boundaries", "border countries")),
        "demonym": re.split(r" or |[,;(]", _text(people, "Nationality", "adjective"))[0].strip(),
        "domain": ".fr" if code == "fr" else (domain.group(0) if domain else ""),
    }
    country.facts = {k: v for k, v in candidates.items() if v and not re.match("no |none", v)}
    return country if "capital" in country.facts else None


def load_countries(folder: Path) -> list[Country]:
    """Independent countries of the Factbook, sorted by name (about 195)."""
    found: dict[str, Country] = {}
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "Capital" in data.get("Government", {}):
            country = _extract(path.stem, data)
            if country and path.parent.name != "meta":
                found[country.name] = country
    return sorted(found.values(), key=lambda c: c.name)


def chat(turns: list[tuple[str, str]], system: str = "") -> str:
    """Turns in ChatML, exactly as the chat template renders them."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return head + "".join(
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n" for q, a in turns
    )


FOLLOW_UPS = {
    "capital": ["And its capital?", "And what is the capital?", "What is its capital?"],
    "currency": ["And its currency?", "Which currency does it use?", "And the money?"],
    "continent": ["And where is it?", "Where is it?"],
    "language": ["And the language?", "What do they speak there?"],
    "neighbours": ["And its neighbours?", "Which countries border it?"],
    "demonym": ["And the adjective?"],
    "domain": ["And its internet code?"],
}
INVERSE = ["Which country has the capital {}?", "{} is the capital of which country?"]
SYSTEMS = ["You are a helpful assistant.", "You are Strata, a small demo model.", "Answer briefly.",
           "You are a helpful assistant. Answer in one sentence."]  # fmt: skip


Turn = tuple[str, str]  # question, answer


def _turns(countries: list[Country], weights: dict[str, float], rng: random.Random) -> Iterator[Turn]:
    """Between one and four turns; half of the later ones ask on about the same country."""
    country, asked = rng.choice(countries), 0
    while True:
        relation = rng.choices(list(country.facts), [weights[r] for r in country.facts])[0]
        follow = asked > 0 and rng.random() < 0.5
        if asked > 0 and not follow:
            country = rng.choice(countries)
            relation = rng.choices(list(country.facts), [weights[r] for r in country.facts])[0]
        question = rng.choice(FOLLOW_UPS[relation]) if follow else country.question(relation, rng)
        yield question, country.sentence(relation)
        asked += 1
        if asked == 4 or rng.random() < 0.55:
            return


def fact_chats(countries: list[Country], count: int, rng: random.Random) -> Iterator[str]:
    """Chats about countries; capitals weigh most because people ask for them first."""
    weights = {"capital": 4.0, "currency": 1.5, "continent": 1.2, "language": 1.2, "neighbours": 1.0,
               "demonym": 0.8, "domain": 0.8}  # fmt: skip
    for _ in range(count):
        system = rng.choice(SYSTEMS) if rng.random() < 0.12 else ""
        if rng.random() < 0.08:
            country = rng.choice(countries)
            capital = country.facts["capital"]
            question = rng.choice(INVERSE)
            yield chat([(question.format(capital), f"{capital} is the capital of {country.name}.")], system)
        else:
            yield chat(list(_turns(countries, weights, rng)), system)


def fact_records(countries: list[Country], count: int, rng: random.Random) -> Iterator[str]:
    """The same facts as small JSON records, one to three in an array."""
    for _ in range(count):
        records = []
        for country in rng.sample(countries, rng.randint(1, 3)):
            keys = [k for k in country.facts if rng.random() < 0.7]
            records.append({"name": country.name} | {k: country.facts[k] for k in keys})
        yield json.dumps(records, indent=rng.choice([2, 2, 2, None]))


def fixed_questions(countries: list[Country]) -> list[dict[str, Any]]:
    """The fixed list of 100 questions: 60 capitals and 40 others, France and Samoa among them."""
    rng = random.Random(100)
    by_name = {c.name: c for c in countries}
    always = ("France", "Samoa", "Germany", "Japan", "Brazil", "Kenya", "Canada", "India")
    first = [by_name[n] for n in always]
    rest = [c for c in countries if c not in first]
    rng.shuffle(rest)
    plan = [("capital", first + rest[:52])]
    sizes = {"currency": 10, "continent": 8, "language": 8, "neighbours": 4, "demonym": 5, "domain": 5}
    for i, (relation, size) in enumerate(sizes.items()):
        pool = first[:2] + rest[52 + 9 * i :] + rest[:52]
        short = [c for c in pool if relation in c.facts and c.facts[relation].count(",") < 3]
        plan.append((relation, short[:size]))
    questions = []
    for relation, chosen in plan:
        for country in chosen:
            question = RELATIONS[relation][1][0].format(c=country.name)
            answers = _accepted(relation, country.facts[relation])
            entry = {"question": question, "answers": answers, "reply": country.sentence(relation)}
            questions.append(entry)
    return questions


def _accepted(relation: str, answer: str) -> list[str]:
    """Strings of which one must appear in the reply."""
    return [re.sub(r" \(.*", "", answer)] if relation == "currency" else [answer]
