// Parses JSON (RFC 8259) into a tree. A program with a JSON library of its own replaces this file.
#pragma once
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace json {

struct Value {
  enum Kind { Null, Bool, Number, String, Array, Object } kind = Null;
  std::string raw;   // the JSON text of the value; empty for an object
  std::string text;  // what a string says; the digits of a number
  std::vector<Value> items;
  std::vector<std::pair<std::string, Value>> fields;

  const Value* find(std::string_view name) const {
    for (const auto& [key, value] : fields)
      if (key == name) return &value;
    return nullptr;
  }
  const Value& at(std::string_view name) const {
    if (const Value* value = find(name)) return *value;
    throw std::runtime_error("no field " + std::string(name));
  }
  double number() const {
    if (kind != Number) throw std::runtime_error("expected a number");
    return std::strtod(raw.c_str(), nullptr);
  }
  long long integer() const {
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(raw.c_str(), &end, 10);
    if (kind != Number || *end != '\0' || errno != 0) throw std::runtime_error("expected a 64-bit integer");
    return value;
  }
  bool is_true() const { return kind == Bool && raw == "true"; }
};

class Parser {
 public:
  static Value parse(std::string_view text) {
    Parser parser{text};
    Value value = parser.value(0);
    if (parser.peek() != '\0') parser.fail("text after the value");
    return value;
  }

 private:
  static constexpr int kMaxDepth = 64;
  std::string_view text_;
  size_t at_ = 0;

  explicit Parser(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error("JSON: " + std::string(what) + " at character " + std::to_string(at_));
  }
  char peek() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void expect(char wanted) {
    if (peek() != wanted) fail((std::string("expected ") + wanted).c_str());
    ++at_;
  }

  Value value(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    const char first = peek();
    const size_t start = at_;
    Value value;
    if (first == '{' || first == '[') {
      const char last = first == '{' ? '}' : ']';
      value.kind = first == '{' ? Value::Object : Value::Array;
      ++at_;
      for (bool more = peek() != last; more; more = peek() == ',' && ++at_) {
        if (first == '[') {
          value.items.push_back(this->value(depth + 1));
          continue;
        }
        if (peek() != '"') fail("expected a name");
        std::string name = string().text;
        expect(':');
        value.fields.emplace_back(std::move(name), this->value(depth + 1));
      }
      expect(last);
      if (first == '[') value.raw = text_.substr(start, at_ - start);
    } else if (first == '"') {
      value = string();
    } else {
      while (at_ < text_.size() && std::string_view(" \t\r\n,]}").find(text_[at_]) == std::string_view::npos) ++at_;
      value.raw = value.text = text_.substr(start, at_ - start);
      if (value.raw == "true" || value.raw == "false") {
        value.kind = Value::Bool;
      } else if (value.raw != "null") {
        char* end = nullptr;
        std::strtod(value.raw.c_str(), &end);
        const bool digits = value.raw.find_first_not_of("+-.0123456789eE") == std::string::npos;
        if (value.raw.empty() || *end != '\0' || !digits) fail("not a value");
        value.kind = Value::Number;
      }
    }
    return value;
  }

  Value string() {
    const size_t start = at_++;
    Value value;
    value.kind = Value::String;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] != '\\') {
        value.text += text_[at_];
        continue;
      }
      const char escape = ++at_ < text_.size() ? text_[at_] : '\0';
      const size_t escape_place = std::string_view("\"\\/bfnrt").find(escape);
      if (escape == 'u') {
        unsigned code = hex();
        if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_ + 1, 2) == "\\u") {
          at_ += 2;
          code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
        }
        append_utf8(value.text, code);
      } else if (escape != '\0' && escape_place != std::string_view::npos) {
        value.text += "\"\\/\b\f\n\r\t"[escape_place];
      } else {
        fail("unknown escape");
      }
    }
    if (at_ >= text_.size()) fail("the text does not end");
    ++at_;
    value.raw = text_.substr(start, at_ - start);
    return value;
  }

  unsigned hex() {  // leaves at_ at the last digit
    const std::string digits(text_.substr(at_ + 1, 4));
    if (digits.size() < 4 || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
      fail("\\u needs four hex digits");
    at_ += 4;
    return static_cast<unsigned>(std::stoul(digits, nullptr, 16));
  }

  static void append_utf8(std::string& out, unsigned code) {
    const int extra = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr unsigned kLead[] = {0, 0xC0, 0xE0, 0xF0};
    out += static_cast<char>(kLead[extra] | (code >> (6 * extra)));
    for (int i = extra - 1; i >= 0; --i) out += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3F));
  }
};

inline Value parse(std::string_view text) { return Parser::parse(text); }

}  // namespace json
