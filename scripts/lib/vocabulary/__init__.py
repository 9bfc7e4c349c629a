"""The draft vocabulary: which target tokens the drafter can propose, and the tables between both numberings."""
