"""The plots of the stories. A plot is a list of beats. A beat is a preferred sentence with its
alternatives: a story contains one of these sentences.

Fields: name, he, He, him, his, His (the hero), thing ("red ball"), place, friend, kind, friend_kind, spot, food.
"""

from __future__ import annotations

from typing import Final

Beat = tuple[str, ...]

OPENINGS: Final[Beat] = (
    "Once upon a time there was a {adjective} {kind} named {name}.",
    "Once upon a time, there was a {adjective} {kind} called {name}.",
    "Once upon a time there lived a {adjective} {kind}. {His} name was {name}.",
    "There was once a {adjective} {kind} named {name}.",
    "One day, a {adjective} {kind} named {name} went for a walk.",
    "Once upon a time there was a {kind} named {name}.",
    "Once upon a time, there was a {kind} called {name}.",
    "There once was a {kind} named {name}.",
    "{name} was a {adjective} {kind}.",
    "One day {name} the {kind} went to the {place}.",
    "This is the story of {name} the {kind}.",
)

HOMES: Final[Beat] = (
    "{name} lived in the {place} and had {a_thing}.",
    "{He} lived in the {place}. {name} had {a_thing}.",
    "In the {place} {he} had a small house and {a_thing}.",
)

ENDINGS: Final[Beat] = (
    "And they lived happily ever after. The end.",
    "From that day on, {name} and {friend} were best friends. The end.",
    "That night {name} went to bed with a smile. The end.",
    "{name} never forgot that day. The end.",
)

PLOTS: Final[tuple[tuple[Beat, ...], ...]] = (
    (
        ("One morning the {thing} was gone.", "One day {name} could not find the {thing}."),
        ("{name} looked {spot}, but it was not there.", "{He} looked {spot} and found nothing."),
        ("{He} was very sad and began to cry.", "{name} sat down and felt sad."),
        ("Then {friend} the {friend_kind} came by.", "Just then {friend} the {friend_kind} came down the road."),
        ('"Why do you cry?" asked {friend}.', '"What is wrong?" said {friend}.'),
        ('"I have lost my {thing}," said {name}.', '"My {thing} is lost," said {name}.'),
        ('"I will help you," said {friend}.', '"Let us look together," said {friend}.'),
        ("They looked behind every tree, and at last they found the {thing}.",),
        ("{name} gave {friend} a big hug.", "{name} was so happy that {he} danced."),
    ),
    (
        ("One day it began to rain.", "One afternoon dark clouds came and it began to rain."),
        ("{name} ran and ran, but there was no house in sight.", "{He} was wet and cold."),
        ("Under a big tree {he} met {friend} the {friend_kind}.",),
        ('"You can stay with me until the rain stops," said {friend}.',),
        ("{name} showed {friend} the {thing}, and they played all afternoon.",),
        ("Then the sun came out, and there was a rainbow in the sky.",),
        ('"How beautiful!" said {name}.', '"Look at all the colors!" said {name}.'),
        ("They walked home together and sang a song.",),
    ),
    (
        ("{name} loved the {thing} very much and took it everywhere.",),
        ("One day {friend} the {friend_kind} came to visit.",),
        ('"May I play with your {thing}?" asked {friend}.', '"That is a nice {thing}," said {friend}.'),
        ('At first {name} said, "No, it is mine."',),
        ("{friend} was sad and went away.",),
        ("Now {name} was all alone, and it was no fun at all.",),
        ("So {he} ran after {friend}.", "{He} thought for a while, and then {he} ran after {friend}."),
        ('"I am sorry," said {name}. "We can share the {thing}."',),
        ("They played until the sun went down.", "They laughed and played all day."),
    ),
    (
        ("Near the {place} there was a deep lake.",),
        ("{name} wanted to swim, but {he} was afraid of the water.",),
        ('"I will teach you," said {friend} the {friend_kind}.',),
        ("On the first day {name} only put one foot in the water.",),
        ("On the second day {he} went in up to the knees.",),
        ("On the third day {he} took a deep breath and jumped.",),
        ('"I can swim!" shouted {name}.', '"Look, I can do it!" shouted {name}.'),
        ("{friend} was proud of {him}.",),
        ("Then they sat in the sun and ate {food}.",),
    ),
    (
        ("One night {name} heard a strange sound.",),
        ('"Who is there?" {he} asked, but nobody answered.',),
        ("{He} took the {thing} and looked {spot}.",),
        ("There sat {friend}, a small {friend_kind}, and shook with cold.",),
        ('"Please do not be afraid," said {friend}. "I have lost my way."',),
        ("{name} gave {friend} some {food} and a warm blanket.",),
        ("In the morning they walked to the {place} together and found the way home.",),
        ('"Thank you, {name}," said {friend}. "You are very kind."',),
    ),
    (
        ("One day {name} found a tiny seed {spot}.",),
        ('"It is too small to be of any use," said {friend} the {friend_kind}.',),
        ("But {name} put the seed in the ground and gave it water every day.",),
        ("For a long time nothing happened.",),
        ("{name} did not give up. {He} waited and sang to the seed.",),
        ("Then, one morning, there was a green leaf.",),
        ("The leaf grew and grew until it was a tall tree.",),
        ("Now {name} and {friend} sit under the tree and eat {food}.",),
        ('"You were right," said {friend}. "Small things can become big."',),
    ),
    (
        ("One day {name} went for a walk with the {thing}.",),
        ("{He} walked so far that {he} did not know the way back.",),
        ("The sun went down, and it became dark.",),
        ('"What shall I do?" thought {name}.',),
        ("Then {he} saw a small light between the trees.",),
        ("It was the house of {friend} the {friend_kind}.",),
        ('"Come in and eat some {food}," said {friend}.',),
        ("After supper {friend} took a lamp and brought {name} home.",),
        ("{name} gave {friend} the {thing} to say thank you.",),
    ),
    (
        ("Today was a special day. It was the birthday of {name}.",),
        ("{He} waited and waited, but nobody came.",),
        ('"They have all forgotten me," said {name}.',),
        ("{He} went outside and looked {spot}.",),
        ('There stood {friend} the {friend_kind} with a big cake. "Surprise!" everyone shouted.',),
        ("They ate cake and {food} and played games.",),
        ("{name} laughed and said that it was the best day of all.",),
    ),
    (
        ("One summer there was a big race.",),
        ("{friend} the {friend_kind} was very fast, and everyone thought that {friend} would win.",),
        ("{name} was slow, but {he} did not stop.",),
        ("In the middle of the race {friend} fell and hurt a foot.",),
        ("{name} could run past and win, but {he} stopped.",),
        ('"Lean on me," said {name}, and they walked to the end together.',),
        ("Everyone clapped their hands.",),
        ('"You are the real winner," said {friend}.',),
        ("They both got a basket of {food}.",),
    ),
    (
        ("Every night {name} looked at the stars.",),
        ("One night a little star fell from the sky and landed {spot}.",),
        ('"Please help me," said the star. "I want to go home."',),
        ("{name} asked {friend} the {friend_kind} what to do.",),
        ("They climbed the highest hill with the star in a basket.",),
        ("{name} threw the star as high as {he} could.",),
        ("Up and up it went, until it was back in the sky.",),
        ("Since then it shines for {name} every night.",),
    ),
    (
        ("One winter {name} had nothing to eat but one bag of {food}.",),
        ('{friend} the {friend_kind} knocked at the door. "I am so hungry," said {friend}.',),
        ("{name} shared all that {he} had.",),
        ('Soon others came, and everyone brought something. "Let us cook soup," said {name}.',),
        ("They put it all into a big pot and cooked it for an hour.",),
        ("It was the best soup in the whole {place}.",),
        ("Nobody was hungry that winter.",),
    ),
    (
        ("One day {name} found an old map {spot}.",),
        ('"It shows a treasure!" said {friend} the {friend_kind}.',),
        ("They packed some {food} and went on their way.",),
        ("They crossed a river and climbed a hill, and then they had to walk through a dark cave.",),
        ("{name} was afraid, but {friend} took {him} by the hand.",),
        ("At the end of the cave there was a box, and in the box was {a_thing}, just like the one at home.",),
        ('"The real treasure is that we are together," said {name}.',),
        ("They laughed and walked home under the stars.",),
    ),
)
