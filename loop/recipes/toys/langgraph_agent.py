"""An agent of LangGraph that is a program: it answers, and once more if that is not digits.

For `agent_program`; it needs langgraph and langchain-openai, and nothing of rlake.
"""
# pyright: reportMissingImports=false

import os
import sys
from typing import Any


def main() -> None:
    """Answer the question of the standard input."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    # it finds OPENAI_BASE_URL and OPENAI_API_KEY by itself
    policy = ChatOpenAI(model=os.environ["OPENAI_MODEL"])

    def answer(state: Any) -> dict[str, Any]:
        return {"messages": [policy.invoke(state["messages"])]}

    def ask_again(state: Any) -> dict[str, Any]:
        return {"messages": [("user", "again: ")]}

    def next_node(state: Any) -> str:
        is_over = len(state["messages"]) > 3 or state["messages"][-1].content.isdigit()
        return END if is_over else "ask_again"

    graph: Any = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("ask_again", ask_again)
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", next_node)
    graph.add_edge("ask_again", "answer")
    done = graph.compile().invoke({"messages": [("user", sys.stdin.read())]})
    print(done["messages"][-1].content)  # noqa: T201 - it is the answer


if __name__ == "__main__":
    main()
