# Keeps the stock of a small shop, and writes what to order.
require "csv"
require "date"

module Inventory
  Item = Struct.new(:sku, :name, :quantity, :reorder_at, :price, keyword_init: true) do
    def value
      quantity * price
    end

    def low?
      quantity <= reorder_at
    end
  end

  class OutOfStock < StandardError
    def initialize(item, wanted)
      super("#{item.name}: #{wanted} wanted, #{item.quantity} in stock")
    end
  end

  class Store
    include Enumerable

    def self.load(path)
      store = new
      CSV.foreach(path, headers: true, header_converters: :symbol) do |row|
        store.add(
          sku: row[:sku], name: row[:name], quantity: Integer(row[:quantity]),
          reorder_at: Integer(row[:reorder_at] || 0), price: Rational(row[:price])
        )
      end
      store
    end

    def initialize
      @items = {}
      @history = []
    end

    def add(**attributes)
      item = Item.new(**attributes)
      raise ArgumentError, "#{item.sku} is there already" if @items.key?(item.sku)

      @items[item.sku] = item
    end

    def each(&block)
      @items.each_value(&block)
    end

    def sell(sku, amount = 1)
      item = @items.fetch(sku) { raise KeyError, "no item #{sku}" }
      raise OutOfStock.new(item, amount) if amount > item.quantity

      item.quantity -= amount
      @history << [Date.today, sku, -amount]
      item.price * amount
    end

    def receive(sku, amount)
      @items.fetch(sku).quantity += amount
      @history << [Date.today, sku, amount]
    end

    def orders
      select(&:low?)
        .sort_by { |item| item.quantity - item.reorder_at }
        .map { |item| [item.sku, [item.reorder_at * 2 - item.quantity, 1].max] }
    end

    def report
      total = sum(&:value)
      lines = sort_by { |item| -item.value }.map do |item|
        format("%-10s %-24s %5d %10.2f%s", item.sku, item.name, item.quantity, item.value, item.low? ? " *" : "")
      end
      lines.push("-" * 52, format("%41s %10.2f", "total", total)).join("\n")
    end
  end
end

if $PROGRAM_NAME == __FILE__
  abort "usage: inventory.rb stock.csv" unless ARGV.one?
  store = Inventory::Store.load(ARGV.first)
  puts store.report
  store.orders.each { |sku, amount| puts "order #{amount} of #{sku}" }
end
