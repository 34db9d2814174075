"""Beginnings of texts, in several languages and kinds, which a model continues by itself."""

BEGINNINGS = (
    "The history of the city begins with a bridge. In the spring of 1204, when the river",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does it take?\nAnswer:",
    "def read_settings(path):\n    with open(path) as file:\n        for",
    "Dear Ms Okafor,\n\nthank you for your letter of 14 March. We are glad to tell you that",
    "| year | rain, mm | snow, cm |\n|---|---|---|\n| 2019 | 612 | 34 |\n| 2020 |",
    "Die Mitochondrien sind Organellen, die in fast allen Zellen vorkommen. Ihre Aufgabe",
    "La receta es sencilla: se pican dos cebollas, se ponen en aceite caliente y",
    "Le théorème dit que toute suite bornée de nombres réels possède",
    "量子计算机利用叠加和纠缠来处理信息。与传统计算机相比,",
    "日本の四季はそれぞれ違った美しさがあります。春になると",
    "#include <stdio.h>\n\nint main(int argc, char **argv) {\n    int sum = 0;\n    for (",
    '{"name": "temperature sensor", "unit": "kelvin", "values": [293.1, 293.4,',
    "She closed the book, looked at the clock, and knew that he would not come. Outside",
    "User: Can you explain how vaccines work, in simple words?\nAssistant:",
    "Theorem. Let n be a natural number. Then the sum of the first n odd numbers is",
    "SELECT customer, SUM(amount) AS total FROM orders WHERE placed_at >=",
)
