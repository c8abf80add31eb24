// A JSON reader in one file: recursive descent, errors with line and column.
#include <cctype>
#include <charconv>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace json {

struct Value;
using Array = std::vector<Value>;
using Object = std::map<std::string, Value, std::less<>>;

struct Value {
    std::variant<std::nullptr_t, bool, double, std::string, Array, Object> content;

    bool is_null() const { return std::holds_alternative<std::nullptr_t>(content); }
    const Object& object() const { return std::get<Object>(content); }
    const Array& array() const { return std::get<Array>(content); }
    double number() const { return std::get<double>(content); }
    const std::string& string() const { return std::get<std::string>(content); }
};

class ParseError : public std::runtime_error {
public:
    ParseError(const std::string& what, std::size_t line, std::size_t column)
        : std::runtime_error("line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + what) {}
};

class Parser {
public:
    explicit Parser(std::string_view text) : text_(text) {}

    Value parse() {
        Value value = parse_value(0);
        skip_space();
        if (place_ != text_.size()) fail("text after the end of the value");
        return value;
    }

private:
    static constexpr int kMaxDepth = 200;

    [[noreturn]] void fail(const std::string& what) const {
        std::size_t line = 1, column = 1;
        for (char c : text_.substr(0, place_)) {
            if (c == '\n') {
                ++line;
                column = 1;
            } else {
                ++column;
            }
        }
        throw ParseError(what, line, column);
    }

    void skip_space() {
        while (place_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[place_]))) ++place_;
    }

    char peek() const { return place_ < text_.size() ? text_[place_] : '\0'; }

    void expect(char c) {
        if (peek() != c) fail(std::string("expected '") + c + "'");
        ++place_;
    }

    Value parse_value(int depth) {
        if (depth > kMaxDepth) fail("nested too deeply");
        skip_space();
        switch (peek()) {
            case '{': return {parse_object(depth)};
            case '[': return {parse_array(depth)};
            case '"': return {parse_string()};
            case 't': literal("true"); return {true};
            case 'f': literal("false"); return {false};
            case 'n': literal("null"); return {nullptr};
            default: return {parse_number()};
        }
    }

    void literal(std::string_view word) {
        if (text_.substr(place_, word.size()) != word) fail("unknown word");
        place_ += word.size();
    }

    double parse_number() {
        double value = 0;
        auto [end, error] = std::from_chars(text_.data() + place_, text_.data() + text_.size(), value);
        if (error != std::errc{}) fail("expected a value");
        place_ = static_cast<std::size_t>(end - text_.data());
        return value;
    }

    std::string parse_string() {
        expect('"');
        std::string out;
        while (peek() != '"') {
            if (place_ >= text_.size()) fail("unterminated string");
            char c = text_[place_++];
            if (c == '\\') {
                switch (text_[place_++]) {
                    case 'n': out += '\n'; break;
                    case 't': out += '\t'; break;
                    case '"': out += '"'; break;
                    case '\\': out += '\\'; break;
                    case '/': out += '/'; break;
                    default: fail("unknown escape");
                }
            } else {
                out += c;
            }
        }
        ++place_;
        return out;
    }

    Array parse_array(int depth) {
        Array out;
        expect('[');
        skip_space();
        if (peek() == ']') return ++place_, out;
        for (;;) {
            out.push_back(parse_value(depth + 1));
            skip_space();
            if (peek() == ']') return ++place_, out;
            expect(',');
        }
    }

    Object parse_object(int depth) {
        Object out;
        expect('{');
        skip_space();
        if (peek() == '}') return ++place_, out;
        for (;;) {
            skip_space();
            std::string key = parse_string();
            skip_space();
            expect(':');
            out.insert_or_assign(std::move(key), parse_value(depth + 1));
            skip_space();
            if (peek() == '}') return ++place_, out;
            expect(',');
        }
    }

    std::string_view text_;
    std::size_t place_ = 0;
};

}  // namespace json
