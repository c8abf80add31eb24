package com.example.time;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;

/** Finds free times between meetings. */
public class Calendar {

    public record Meeting(String title, int start, int end) {
        public Meeting {
            if (end <= start) {
                throw new IllegalArgumentException(title + " ends before it starts");
            }
        }

        boolean overlaps(Meeting other) {
            return start < other.end && other.start < end;
        }

        int minutes() {
            return end - start;
        }
    }

    private final List<Meeting> meetings = new ArrayList<>();

    /** Adds a meeting unless it overlaps another, which is returned. */
    public Optional<Meeting> add(Meeting meeting) {
        Optional<Meeting> conflict = meetings.stream().filter(meeting::overlaps).findFirst();
        if (conflict.isEmpty()) {
            meetings.add(meeting);
            meetings.sort(Comparator.comparingInt(Meeting::start));
        }
        return conflict;
    }

    /** Returns the earliest start of a gap of the wanted length within working hours, or -1. */
    public int firstGap(int minutes, int open, int close) {
        int free = open;
        for (Meeting meeting : meetings) {
            if (meeting.end() <= open) {
                continue;
            }
            if (meeting.start() - free >= minutes) {
                return free;
            }
            free = Math.max(free, meeting.end());
        }
        return close - free >= minutes ? free : -1;
    }

    public int busyMinutes() {
        return meetings.stream().mapToInt(Meeting::minutes).sum();
    }

    public static void main(String[] args) {
        Calendar calendar = new Calendar();
        calendar.add(new Meeting("stand-up", 9 * 60, 9 * 60 + 15));
        calendar.add(new Meeting("review", 10 * 60, 11 * 60));
        calendar.add(new Meeting("lunch", 12 * 60, 13 * 60))
                .ifPresent(other -> System.out.println("conflict with " + other.title()));
        int start = calendar.firstGap(60, 9 * 60, 17 * 60);
        System.out.printf("first free hour: %02d:%02d%n", start / 60, start % 60);
        System.out.println("busy for " + calendar.busyMinutes() + " minutes");
    }
}
