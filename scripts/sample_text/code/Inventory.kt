package com.example.inventory

import java.time.Instant
import java.util.concurrent.ConcurrentHashMap

sealed interface Event {
    val at: Instant

    data class Received(val sku: String, val amount: Int, override val at: Instant) : Event
    data class Shipped(val sku: String, val amount: Int, val order: Long, override val at: Instant) : Event
    data class Corrected(val sku: String, val counted: Int, val reason: String, override val at: Instant) : Event
}

data class Stock(val sku: String, val onHand: Int = 0, val shipped: Int = 0, val lastCounted: Instant? = null) {
    fun apply(event: Event): Stock = when (event) {
        is Event.Received -> copy(onHand = onHand + event.amount)
        is Event.Shipped -> copy(onHand = onHand - event.amount, shipped = shipped + event.amount)
        is Event.Corrected -> copy(onHand = event.counted, lastCounted = event.at)
    }
}

class NotEnough(val sku: String, val wanted: Int, val available: Int) :
    IllegalStateException("$sku: $wanted wanted, $available on hand")

/** The state is what all events together make of nothing; it can be rebuilt at any time. */
class Warehouse(private val clock: () -> Instant = Instant::now) {
    private val log = mutableListOf<Event>()
    private val stock = ConcurrentHashMap<String, Stock>()

    @Synchronized
    fun receive(sku: String, amount: Int) {
        require(amount > 0) { "an amount is positive, not $amount" }
        record(sku, Event.Received(sku, amount, clock()))
    }

    @Synchronized
    fun ship(order: Long, lines: Map<String, Int>) {
        // All lines are checked before any is taken: an order ships whole or not at all.
        for ((sku, wanted) in lines) {
            val available = stock[sku]?.onHand ?: 0
            if (available < wanted) throw NotEnough(sku, wanted, available)
        }
        lines.forEach { (sku, amount) -> record(sku, Event.Shipped(sku, amount, order, clock())) }
    }

    fun low(threshold: Int): List<Stock> =
        stock.values.filter { it.onHand <= threshold }.sortedBy { it.onHand }

    fun history(sku: String): Sequence<Event> = log.asSequence().filter {
        when (it) {
            is Event.Received -> it.sku == sku
            is Event.Shipped -> it.sku == sku
            is Event.Corrected -> it.sku == sku
        }
    }

    private fun record(sku: String, event: Event) {
        log += event
        stock.compute(sku) { key, old -> (old ?: Stock(key)).apply(event) }
    }
}

fun main() {
    val warehouse = Warehouse()
    warehouse.receive("lamp", 10)
    warehouse.receive("shade", 4)
    warehouse.ship(order = 1, lines = mapOf("lamp" to 3, "shade" to 3))
    try {
        warehouse.ship(order = 2, lines = mapOf("lamp" to 1, "shade" to 2))
    } catch (error: NotEnough) {
        println("order 2 waits: ${error.message}")
    }
    warehouse.low(threshold = 5).forEach { println("${it.sku.padEnd(8)} ${it.onHand}") }
}
