"""A taskset of verifiers, and one whose environment has a judge; loaded by verifiers, never by the tests."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward
    async def answered(self, trace) -> float:
        return float("answer" in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return self.data.idx / 4


class Sums(vf.Taskset[Sum]):
    def load(self):
        print("tasksets may print")
        for number in range(8):
            prompt = f"What is {number} + {number}?"
            yield Sum(Data(idx=number, prompt=prompt, answer=str(2 * number)), self.config.task)


class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Judged(vf.Env[JudgedConfig]):
    async def run(self, task, agents) -> None:
        solved = await agents.solver.run(task)
        await agents.judge.run(task.with_data(prompt=f"Is it right? {solved.last_reply}"))


__all__ = ["Judged", "JudgedConfig", "Sums"]
