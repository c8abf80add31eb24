using System;
using System.Collections.Generic;
using System.Linq;

namespace Example.Adventure;

public enum Direction { North, East, South, West }

public sealed record Item(string Name, string Description, bool Portable = true);

public sealed class Room
{
    private readonly Dictionary<Direction, Room> exits = new();

    public Room(string name, string description)
    {
        Name = name;
        Description = description;
    }

    public string Name { get; }
    public string Description { get; }
    public List<Item> Items { get; } = new();
    public IReadOnlyDictionary<Direction, Room> Exits => exits;

    public void Connect(Direction direction, Room other)
    {
        exits[direction] = other;
        other.exits[Opposite(direction)] = this;
    }

    private static Direction Opposite(Direction direction) => (Direction)(((int)direction + 2) % 4);
}

public sealed class Game
{
    private readonly List<Item> carried = new();
    private Room here;

    public Game(Room start) => here = start;

    public bool Over { get; private set; }

    public string Obey(string line)
    {
        var words = line.Trim().ToLowerInvariant().Split(' ', StringSplitOptions.RemoveEmptyEntries);
        return words switch
        {
            [] => "Say something.",
            ["look"] => Look(),
            ["go", var where] when Enum.TryParse<Direction>(where, true, out var direction) => Go(direction),
            ["take", .. var rest] => Take(string.Join(' ', rest)),
            ["drop", .. var rest] => Drop(string.Join(' ', rest)),
            ["inventory"] or ["i"] => carried.Count == 0 ? "You carry nothing." : "You carry " + List(carried) + ".",
            ["quit"] => Quit(),
            [var verb, ..] => $"I don't know how to {verb}.",
        };
    }

    private string Look()
    {
        var text = $"{here.Name}\n{here.Description}";
        if (here.Items.Count > 0)
            text += $"\nYou see {List(here.Items)}.";
        return text + "\nExits: " + string.Join(", ", here.Exits.Keys.Order()) + ".";
    }

    private string Go(Direction direction)
    {
        if (!here.Exits.TryGetValue(direction, out var next))
            return "There is only wall.";
        here = next;
        return Look();
    }

    private string Take(string name)
    {
        var item = here.Items.FirstOrDefault(i => i.Name == name);
        if (item is null)
            return $"There is no {name} here.";
        if (!item.Portable)
            return $"The {name} will not move.";
        here.Items.Remove(item);
        carried.Add(item);
        return "Taken.";
    }

    private string Drop(string name)
    {
        var item = carried.Find(i => i.Name == name);
        if (item is null)
            return $"You don't carry a {name}.";
        carried.Remove(item);
        here.Items.Add(item);
        return "Dropped.";
    }

    private string Quit()
    {
        Over = true;
        return "Until next time.";
    }

    private static string List(IEnumerable<Item> items) => string.Join(", ", items.Select(i => "a " + i.Name));
}
