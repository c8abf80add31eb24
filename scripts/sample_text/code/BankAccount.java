package com.example.bank;

import java.math.BigDecimal;
import java.math.RoundingMode;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.locks.ReentrantLock;

/** An account whose balance is the sum of its entries. Safe to use from several threads. */
public final class BankAccount {

    /** A movement of money; positive amounts come in. */
    public record Entry(Instant time, BigDecimal amount, String reference) {
        public Entry {
            Objects.requireNonNull(time);
            Objects.requireNonNull(reference);
            if (amount.signum() == 0) {
                throw new IllegalArgumentException("an entry must move money");
            }
        }
    }

    public static final class InsufficientFunds extends Exception {
        private final BigDecimal missing;

        InsufficientFunds(BigDecimal missing) {
            super("the balance is short of " + missing);
            this.missing = missing;
        }

        public BigDecimal missing() {
            return missing;
        }
    }

    private final long number;
    private final ReentrantLock lock = new ReentrantLock();
    private final List<Entry> entries = new ArrayList<>();
    private BigDecimal balance = BigDecimal.ZERO.setScale(2);

    public BankAccount(long number) {
        this.number = number;
    }

    public void deposit(BigDecimal amount, String reference) {
        add(positive(amount), reference);
    }

    public void withdraw(BigDecimal amount, String reference) throws InsufficientFunds {
        BigDecimal wanted = positive(amount);
        lock.lock();
        try {
            if (balance.compareTo(wanted) < 0) {
                throw new InsufficientFunds(wanted.subtract(balance));
            }
            add(wanted.negate(), reference);
        } finally {
            lock.unlock();
        }
    }

    /** Moves money between two accounts. Locks are taken in the order of numbers, so that two transfers cannot wait for each other. */
    public static void transfer(BankAccount from, BankAccount to, BigDecimal amount) throws InsufficientFunds {
        BankAccount first = from.number < to.number ? from : to;
        BankAccount second = first == from ? to : from;
        first.lock.lock();
        second.lock.lock();
        try {
            from.withdraw(amount, "transfer to " + to.number);
            to.deposit(amount, "transfer from " + from.number);
        } finally {
            second.lock.unlock();
            first.lock.unlock();
        }
    }

    public BigDecimal balance() {
        lock.lock();
        try {
            return balance;
        } finally {
            lock.unlock();
        }
    }

    public List<Entry> entries() {
        lock.lock();
        try {
            return Collections.unmodifiableList(new ArrayList<>(entries));
        } finally {
            lock.unlock();
        }
    }

    private void add(BigDecimal amount, String reference) {
        lock.lock();
        try {
            entries.add(new Entry(Instant.now(), amount, reference));
            balance = balance.add(amount);
        } finally {
            lock.unlock();
        }
    }

    private static BigDecimal positive(BigDecimal amount) {
        if (amount.signum() <= 0) {
            throw new IllegalArgumentException("the amount must be positive, not " + amount);
        }
        return amount.setScale(2, RoundingMode.HALF_EVEN);
    }
}
