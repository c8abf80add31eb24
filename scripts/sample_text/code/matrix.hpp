#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <vector>

namespace numerics {

// A dense matrix in row-major order.
template <typename T>
class Matrix {
public:
    Matrix(std::size_t rows, std::size_t cols, T value = T{})
        : rows_(rows), cols_(cols), data_(rows * cols, value) {}

    Matrix(std::initializer_list<std::initializer_list<T>> init)
        : rows_(init.size()), cols_(init.begin()->size()) {
        data_.reserve(rows_ * cols_);
        for (const auto& row : init) {
            if (row.size() != cols_) throw std::invalid_argument("rows differ in length");
            data_.insert(data_.end(), row.begin(), row.end());
        }
    }

    static Matrix identity(std::size_t n) {
        Matrix m(n, n);
        for (std::size_t i = 0; i < n; ++i) m(i, i) = T{1};
        return m;
    }

    T& operator()(std::size_t i, std::size_t j) { return data_[i * cols_ + j]; }
    const T& operator()(std::size_t i, std::size_t j) const { return data_[i * cols_ + j]; }
    std::size_t rows() const noexcept { return rows_; }
    std::size_t cols() const noexcept { return cols_; }

    Matrix transposed() const {
        Matrix out(cols_, rows_);
        for (std::size_t i = 0; i < rows_; ++i)
            for (std::size_t j = 0; j < cols_; ++j) out(j, i) = (*this)(i, j);
        return out;
    }

    friend Matrix operator*(const Matrix& a, const Matrix& b) {
        if (a.cols_ != b.rows_) throw std::invalid_argument("shapes do not match");
        Matrix out(a.rows_, b.cols_);
        // The order i, k, j reads both operands along their rows.
        for (std::size_t i = 0; i < a.rows_; ++i)
            for (std::size_t k = 0; k < a.cols_; ++k) {
                const T factor = a(i, k);
                for (std::size_t j = 0; j < b.cols_; ++j) out(i, j) += factor * b(k, j);
            }
        return out;
    }

private:
    std::size_t rows_, cols_;
    std::vector<T> data_;
};

// The lower triangular factor L of a symmetric positive definite matrix A = L Lᵀ.
// Nothing, if the matrix is not positive definite.
inline std::optional<Matrix<double>> cholesky(const Matrix<double>& a) {
    const std::size_t n = a.rows();
    Matrix<double> l(n, n);
    for (std::size_t j = 0; j < n; ++j) {
        double diagonal = a(j, j);
        for (std::size_t k = 0; k < j; ++k) diagonal -= l(j, k) * l(j, k);
        if (diagonal <= 0.0) return std::nullopt;
        l(j, j) = std::sqrt(diagonal);
        for (std::size_t i = j + 1; i < n; ++i) {
            double sum = a(i, j);
            for (std::size_t k = 0; k < j; ++k) sum -= l(i, k) * l(j, k);
            l(i, j) = sum / l(j, j);
        }
    }
    return l;
}

}  // namespace numerics
