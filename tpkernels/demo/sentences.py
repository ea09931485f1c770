"""Sentences that the demo embeds, written for it: eight subjects with a few sentences each, and a question for some."""

from __future__ import annotations

__all__ = ["QUESTIONS", "SENTENCES"]

SENTENCES = (
    # the sea
    "The fishing boats came back to the harbour before the storm.",
    "A lighthouse keeper watched the waves climb over the rocks.",
    "At low tide the children collect shells along the beach.",
    "Sailors used the stars to find their way across the ocean.",
    # cooking
    "Let the dough rest in a warm place until it has doubled in size.",
    "She seasoned the soup with thyme, garlic and a little lemon.",
    "The bakery on the corner sells fresh bread every morning.",
    "Slice the onions thinly and fry them slowly in butter.",
    # space
    "The probe sent its first pictures of the icy moon to Earth.",
    "Astronomers measured the distance to a faint, far galaxy.",
    "A comet with a long tail was visible for three nights.",
    "The rocket's second stage burned for six minutes.",
    # health
    "The doctor advised him to sleep longer and to walk every day.",
    "A vaccine prepares the body to fight an infection.",
    "The nurse changed the bandage and checked the patient's pulse.",
    "Regular exercise lowers the risk of heart disease.",
    # computing
    "Each process holds one part of the matrix and sends the rest on.",
    "The compiler rejected the program because of a missing bracket.",
    "Network transfers take longer than the arithmetic.",
    "Two threads wrote to the same memory without a lock.",
    # music
    "The orchestra tuned its instruments before the concert began.",
    "He practises the same piano sonata for an hour each evening.",
    "Her voice filled the small church without a microphone.",
    "The drummer counted in, and the whole band started to play.",
    # weather
    "Heavy rain flooded the lower streets of the town.",
    "After a cold night the meadow was white with frost.",
    "Dark clouds gathered over the hills in the late afternoon.",
    "The forecast promises sunshine and a light wind from the south.",
    # money
    "The bank raised its interest rates for the second time this year.",
    "They saved a little every month to pay for a new roof.",
    "Prices of wheat fell after the unexpectedly good harvest.",
    "The company reported higher profits than its investors expected.",
)

QUESTIONS = (
    "How do I stay healthy?",
    "Why is distributed computing slow?",
    "What was seen in the night sky?",
)
"""Each is answered by the most similar of the sentences."""
