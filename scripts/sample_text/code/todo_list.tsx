import { useEffect, useMemo, useReducer, useState } from "react";

interface Task {
  id: number;
  title: string;
  done: boolean;
  due?: string;
}

type Action =
  | { type: "loaded"; tasks: Task[] }
  | { type: "added"; title: string; due?: string }
  | { type: "toggled"; id: number }
  | { type: "removed"; id: number };

function reduce(tasks: Task[], action: Action): Task[] {
  switch (action.type) {
    case "loaded":
      return action.tasks;
    case "added": {
      const id = tasks.reduce((highest, task) => Math.max(highest, task.id), 0) + 1;
      return [...tasks, { id, title: action.title, done: false, due: action.due }];
    }
    case "toggled":
      return tasks.map((task) => (task.id === action.id ? { ...task, done: !task.done } : task));
    case "removed":
      return tasks.filter((task) => task.id !== action.id);
  }
}

const STORAGE_KEY = "tasks";

function useTasks() {
  const [tasks, dispatch] = useReducer(reduce, []);

  useEffect(() => {
    const saved = localStorage.getItem(STORAGE_KEY);
    if (saved) dispatch({ type: "loaded", tasks: JSON.parse(saved) as Task[] });
  }, []);

  useEffect(() => {
    localStorage.setItem(STORAGE_KEY, JSON.stringify(tasks));
  }, [tasks]);

  return { tasks, dispatch };
}

export function TodoList() {
  const { tasks, dispatch } = useTasks();
  const [title, setTitle] = useState("");
  const [hideDone, setHideDone] = useState(false);

  const shown = useMemo(
    () => tasks.filter((task) => !hideDone || !task.done).sort((a, b) => (a.due ?? "~").localeCompare(b.due ?? "~")),
    [tasks, hideDone],
  );
  const left = tasks.filter((task) => !task.done).length;

  return (
    <section className="todo">
      <h2>
        Tasks <small>({left} left)</small>
      </h2>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!title.trim()) return;
          dispatch({ type: "added", title: title.trim() });
          setTitle("");
        }}
      >
        <input value={title} onChange={(event) => setTitle(event.target.value)} placeholder="What needs doing?" />
        <button type="submit">Add</button>
      </form>
      <label>
        <input type="checkbox" checked={hideDone} onChange={() => setHideDone(!hideDone)} /> Hide what is done
      </label>
      <ul>
        {shown.map((task) => (
          <li key={task.id} className={task.done ? "done" : undefined}>
            <input
              type="checkbox"
              checked={task.done}
              onChange={() => dispatch({ type: "toggled", id: task.id })}
              aria-label={`Mark ${task.title}`}
            />
            <span>{task.title}</span>
            {task.due && <time dateTime={task.due}>{task.due}</time>}
            <button onClick={() => dispatch({ type: "removed", id: task.id })}>Remove</button>
          </li>
        ))}
      </ul>
      {shown.length === 0 && <p>Nothing to do.</p>}
    </section>
  );
}
