"""Ten debugging tasks with hidden answers, in a lake prepared for them: can the viewer tell what went wrong?

`shop.py` is a shop with customers and tools, `agent.py` what a support agent does there, `plan.py` what goes wrong and
when, `history.py` the lake of it, `training.py` what a trainer writes, `cases.py` the questions, and the SQL that
computes their answers from the lake. `second_plan.py` and `second_cases.py` are another lake and ten other questions.
"""
