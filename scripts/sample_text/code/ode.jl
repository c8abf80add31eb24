# Integrate ordinary differential equations with an adaptive step.
module Integrate

export solve, Solution

struct Solution{T}
    t::Vector{Float64}
    u::Vector{T}
    rejected::Int
end

"""
    solve(f, u0, (t0, t1); rtol = 1e-6, atol = 1e-9)

Solve `u' = f(u, t)` with the pair of Bogacki and Shampine, of orders 3 and 2. The difference of the two is the
estimate of the error, which sets the next step.
"""
function solve(f, u0, (t0, t1); rtol = 1e-6, atol = 1e-9, h = (t1 - t0) / 100)
    t, u = float(t0), u0
    ts, us = [t], [u]
    rejected = 0
    k1 = f(u, t)
    while t < t1
        h = min(h, t1 - t)
        k2 = f(u .+ h / 2 .* k1, t + h / 2)
        k3 = f(u .+ 3h / 4 .* k2, t + 3h / 4)
        next = u .+ h / 9 .* (2 .* k1 .+ 3 .* k2 .+ 4 .* k3)
        k4 = f(next, t + h)
        error = h .* (-5 / 72 .* k1 .+ 1 / 12 .* k2 .+ 1 / 9 .* k3 .- 1 / 8 .* k4)
        scale = atol .+ rtol .* max.(abs.(u), abs.(next))
        size = sqrt(sum(abs2, error ./ scale) / length(u))
        if size <= 1
            t += h
            u, k1 = next, k4   # the last slope is the first of the next step
            push!(ts, t)
            push!(us, u)
        else
            rejected += 1
        end
        h *= clamp(0.9 * size^(-1 / 3), 0.2, 5.0)
    end
    return Solution(ts, us, rejected)
end

end

using .Integrate

pendulum(u, t) = [u[2], -9.81 * sin(u[1])]
energy(u) = u[2]^2 / 2 + 9.81 * (1 - cos(u[1]))

solution = solve(pendulum, [1.0, 0.0], (0, 10))
drift = energy(solution.u[end]) - energy(solution.u[1])
println("$(length(solution.t)) steps, $(solution.rejected) rejected, energy drift $(round(drift; sigdigits = 2))")
