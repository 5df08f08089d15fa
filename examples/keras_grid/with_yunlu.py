"""The same grid search with Yunlu: the network of network.py, trained by Yunlu runs.

Run it in this folder: `python with_yunlu.py`.
expects: test accuracy >= 0.93
"""

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split

from yunlu import YunluClassifier

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

grid = GridSearchCV(
    YunluClassifier(model="network.py:create_model", optimizer="adam", epochs=3, keep_run=False),
    {"learning_rate": [0.001, 0.01], "batch_size": [16, 64]},
    cv=2,
)
grid.fit(x_train, y_train)
print("Best parameters:", grid.best_params_)
print("Test accuracy:", grid.score(x_test, y_test))
