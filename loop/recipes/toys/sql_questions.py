"""Questions about small random tables that need no download, each with a query for an answer."""

from collections.abc import Iterator

import numpy as np

from ....store import Task

_NAMES = ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jun")
_CITIES = ("Rome", "Oslo", "Lima", "Pune")
_QUESTIONS = (
    ("How many people live in {city}?", "SELECT count(*) FROM people WHERE city = '{city}'"),
    ("How old is {name}?", "SELECT age FROM people WHERE name = '{name}'"),
    ("Who is older than {age}?", "SELECT name FROM people WHERE age > {age}"),
    ("What is the mean age in each city?", "SELECT city, avg(age) FROM people GROUP BY city"),
    ("Who is the oldest of {city}?", "SELECT arg_max(name, age) FROM people WHERE city = '{city}'"),
)


def people_questions(
    *,
    questions: int = 100,
    held_out: int = 20,
    rows: int = 8,
    seed: int = 0,
    taskset: str = "people_questions",
) -> Iterator[Task]:
    """Yield questions about a table `people(name, age, city)`, for the environment `sql`.

    The answer is a query; the metadata have the table, which is another one for each question.

    >>> [task] = people_questions(questions=1, held_out=0)
    >>> task.prompt_text, task.answer
    ('How old is Elif?', "SELECT age FROM people WHERE name = 'Elif'")
    """
    rng = np.random.default_rng(seed)
    for i in range(questions):
        names = [str(name) for name in rng.permutation(_NAMES)[:rows]]
        ages = [int(age) for age in rng.permutation(60)[:rows] + 18]
        cities = [str(city) for city in rng.choice(_CITIES, rows)]
        message = {"name": names[0], "age": ages[0], "city": cities[0]}
        question, query = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
        people = [
            {"name": name, "age": age, "city": city}
            for name, age, city in zip(names, ages, cities, strict=True)
        ]
        yield Task.ask(
            question.format(**message),
            query.format(**message),
            taskset=taskset,
            split="eval" if i < held_out else "train",
            metadata={"tables": {"people": people}},
        )
